"""Reasoning in answers, end to end: bounded, followed by structured output, kept separate."""

import json
from collections.abc import Iterator

import openai
import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.base.errors import ConfigError, RequestError
from quire.base.settings.config import ServerConfig
from quire.serve.context import ApiContext
from tests.serve.api.conftest import serving
from tests.support.serve.fake_client import FakeClient

# The prompt opens reasoning unless that is disabled, as for models that always think.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{# calls, if any: <tool_call> #}"
)
MESSAGES = [{"role": "user", "content": "Once upon a time"}]
MOODS = StructuredOutputsParams(choice=["good", "bad"])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "demo", chat_template=TEMPLATE, max_model_len=512, kv_cache_memory_bytes=16 << 20,
        max_num_seqs=8, disable_log_stats=True,
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[openai.OpenAI]:
    engine = llm.engine
    context = ApiContext(
        FakeClient(engine), engine.renderer, engine.requests, ("demo",), ServerConfig(), 0
    )
    with serving(context) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as made:
        yield made


def test_constrained_output_follows_the_reasoning(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120, structured_outputs=MOODS, thinking_token_budget=40)
    [output] = llm.chat(MESSAGES, params, use_tqdm=False)
    reasoning, close, rest = output.outputs[0].text.partition("</think>")
    assert close and 0 < len(reasoning) <= 40 + 1
    assert rest.strip() in ("good", "bad")


def test_plain_prompt_may_open_reasoning(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120, structured_outputs=MOODS, thinking_token_budget=40)
    both = [params, SamplingParams(max_tokens=120, structured_outputs=MOODS)]
    opened, plain = llm.generate(["assistant:<think>\n", "user: Hi"], both, use_tqdm=False)
    assert "</think>" in opened.outputs[0].text
    assert plain.outputs[0].text in ("good", "bad")


def test_thinking_budget_needs_a_reasoning_format(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no reasoning format is known") as caught:
        llm.generate("Hi", SamplingParams(thinking_token_budget=5), use_tqdm=False)
    assert caught.value.field == "thinking_token_budget"


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_separated_from_content(client: openai.OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=200, stream=stream, seed=5,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "object", "properties": {"mood": {"enum": ["good", "bad"]}},
            "required": ["mood"], "additionalProperties": False}}},
        extra_body={"thinking_token_budget": 30},
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip
    if stream:
        chunks = list(answer)
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        other = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
        usage = chunks[-1].usage
    else:
        message = answer.choices[0].message
        reasoning, other, content = message.reasoning, message.reasoning_content, message.content
        usage = answer.usage
    assert reasoning == other and 0 < len(reasoning) <= 30
    assert json.loads(content)["mood"] in ("good", "bad")
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_thinking_can_be_switched_off(client: openai.OpenAI) -> None:
    """The prompt then has an empty reasoning block, so the answer starts as content."""
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=8, temperature=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    message = answer.choices[0].message
    assert message.content and not hasattr(message, "reasoning")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_unfinished_reasoning_is_never_content(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=8, temperature=0
    )
    message = answer.choices[0].message
    assert message.content == "" and message.reasoning
    assert answer.usage.completion_tokens_details.reasoning_tokens == 8


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parser_is_rejected_at_startup(setting: str) -> None:
    with pytest.raises(ConfigError, match="there is no format of .* 'nonsense'; there are auto"):
        LLM("demo", **{setting: "nonsense"})
