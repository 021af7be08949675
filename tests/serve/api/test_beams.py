"""Beam search over HTTP: the engine's beams as choices, best first."""

import openai
import pytest

from quire import LLM, SamplingParams

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def expected() -> tuple[list[str], list[str]]:
    """Texts of the best three of four beams, of a completion and of a chat."""
    params = SamplingParams(n=3, beam_width=4, use_beam_search=True, max_tokens=24)
    with LLM("demo", disable_log_stats=True) as llm:
        [text] = llm.generate([PROMPT], params, use_tqdm=False)
        [chat] = llm.chat(MESSAGES, params, use_tqdm=False)
    return [c.text for c in text.outputs], [c.text for c in chat.outputs]


BEAMS = {"use_beam_search": True, "beam_width": 4}


def test_completions(openai_client: openai.OpenAI, expected: tuple[list[str], list[str]]) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, n=3, max_tokens=24, extra_body=BEAMS
    )
    assert [choice.text for choice in answer.choices] == expected[0]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_chat(openai_client: openai.OpenAI, expected: tuple[list[str], list[str]]) -> None:
    answer = openai_client.chat.completions.create(
        model="demo", messages=MESSAGES, n=3, max_tokens=24, extra_body=BEAMS
    )
    assert [choice.message.content for choice in answer.choices] == expected[1]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({**BEAMS, "stream": True}, "use_beam_search"),
        ({**BEAMS, "top_p": 0.5}, "top_p"),
        ({**BEAMS, "beam_width": 2}, "beam_width"),
        ({**BEAMS, "early_stopping": "now"}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"beam_width": 3}, "beam_width"),
    ],
)
def test_what_does_not_go_together(
    openai_client: openai.OpenAI, more: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.completions.create(model="demo", prompt=PROMPT, n=3, extra_body=more)
    assert refused.value.param is not None and refused.value.param.startswith(param)
