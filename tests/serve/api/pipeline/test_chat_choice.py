"""Reasoning, content and calls in responses, whole and in chunks."""

from typing import Any

import pytest

from quire.base.messages import Request
from quire.base.requests.outputs import CompletionOutput, RequestOutput
from quire.base.requests.sampling_params import SamplingParams
from quire.render.answers.format import AnswerFormat, RequestedAnswer
from quire.render.answers.syntax import Tool
from quire.render.answers.table import HERMES, THINK
from quire.render.renderer import RenderedPrompt
from quire.serve.bodies.logprobs_json import TokenNames
from quire.serve.bodies.protocol import ChatCompletionRequest
from quire.serve.pipeline.answer import UsageCounter, usage_json
from quire.serve.pipeline.chat_choice import ChatChoice
from quire.serve.pipeline.parsed_answer import parsed_answer
from quire.serve.pipeline.plan import ChatPlan
from quire.serve.pipeline.requests import PromptJob
from tests.support.serve.direct_engine import twin

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
REQUESTED = RequestedAnswer(AnswerFormat(HERMES, THINK), (Tool("f"),))


class Answering:
    """A chat choice that turns the text of a response into JSON."""

    def __init__(self, **fields: Any) -> None:
        self.tokenizer = twin().renderer.tokenizer
        body = ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], **fields)
        job = PromptJob(RenderedPrompt([1]), Request("r", [1], SamplingParams(), 0))
        self.usage = UsageCounter(1, num_reasoning=0)
        parsed = parsed_answer(REQUESTED, body, self.tokenizer, SamplingParams(), [])
        plan = ChatPlan(body, "r", "demo", "")
        names = TokenNames(self.tokenizer, False) if body.logprobs else None
        self.choice = ChatChoice(0, plan, job, names, self.usage, parsed)

    def output(self, token_ids: list[int], reason: str | None) -> tuple[RequestOutput, Any]:
        text = self.tokenizer.decode(token_ids)
        completion = CompletionOutput(0, text, token_ids, None, None, reason)
        return RequestOutput("r", "", [1], None, [completion], reason is not None), completion

    def whole(self, text: str) -> dict[str, Any]:
        return self.choice.whole(*self.output(self.tokenizer.encode(text), "stop"))["choices"][0]

    def deltas(self, text: str) -> list[dict[str, Any]]:
        token_ids, found = self.tokenizer.encode(text), []
        for number, token_id in enumerate(token_ids, start=1):
            reason = "stop" if number == len(token_ids) else None
            chunks = self.choice.chunks(*self.output([token_id], reason))
            found += [choice for chunk in chunks for choice in chunk["choices"]]
        return found

    @property
    def num_reasoning(self) -> int:
        return usage_json([[self.choice]])["completion_tokens_details"]["reasoning_tokens"]


def joined(choices: list[dict[str, Any]], name: str) -> str:
    return "".join(choice["delta"].get(name) or "" for choice in choices)


def test_whole_response_has_reasoning_content_and_calls() -> None:
    answering = Answering()
    choice = answering.whole(f"<think>\nhm, x\n</think>\n\nI call.\n{CALL}")
    message = choice["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm, x"
    assert message["content"] == "I call."
    [call] = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert set(call) == {"id", "type", "function"}
    assert choice["finish_reason"] == "tool_calls"


def test_streamed_response_has_reasoning_content_and_calls() -> None:
    answering = Answering(stream=True)
    choices = answering.deltas(f"<think>\nhm, x\n</think>\n\nI call.\n{CALL}")
    assert joined(choices, "reasoning") == joined(choices, "reasoning_content") == "hm, x"
    assert joined(choices, "content") == "I call."
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [call["function"].get("name") for call in calls if "id" in call] == ["f"]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"x": 1}'
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("reasoning", "rest"),
    [("<think>\nhm, x\n</think>", "\n\nyes"), ("", "yes"), ("", f"{CALL}"), ("<think>never", "")],
)
def test_reasoning_tokens_are_counted(streams: bool, reasoning: str, rest: str) -> None:
    """Tokens count up to the one that completes the closing mark."""
    answering = Answering(stream=streams)
    answering.deltas(reasoning + rest) if streams else answering.whole(reasoning + rest)
    tokenizer = answering.tokenizer
    token_ids = tokenizer.encode(reasoning + rest)
    lengths = [len(tokenizer.decode(token_ids[:n])) for n in range(len(token_ids) + 1)]
    expected = next(n for n, length in enumerate(lengths) if length >= len(reasoning))
    assert answering.num_reasoning == expected


def test_include_reasoning_false_omits_reasoning() -> None:
    answering = Answering(include_reasoning=False)
    message = answering.whole("<think>hm</think>yes")["message"]
    assert (message["content"], "reasoning" in message) == ("yes", False)
    assert answering.num_reasoning > 0


def test_truncated_call_does_not_finish_as_tool_calls() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"city": "Pa'
    for streams in (False, True):
        answering = Answering(stream=streams)
        choice = answering.deltas(broken)[-1] if streams else answering.whole(broken)
        assert choice["finish_reason"] == "stop"


def test_several_steps_in_one_output_keep_their_order() -> None:
    """A slow reader gets several steps in one output."""
    answering = Answering()
    token_ids = answering.tokenizer.encode(f"One.{CALL}Two.<think>Hm.</think>")
    chunks = answering.choice.chunks(*answering.output(token_ids, "stop"))
    choices = [choice for chunk in chunks[1:] for choice in chunk["choices"]]
    assert [set(choice["delta"]) for choice in choices] == [
        {"content", "tool_calls"}, {"content"}, {"reasoning", "reasoning_content"},
    ]  # fmt: skip
    assert [choice["delta"].get("content") for choice in choices] == ["One.", "Two.", None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "tool_calls"]
