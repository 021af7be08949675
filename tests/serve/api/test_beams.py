"""Beam search over HTTP: the engine's beams as choices, best first."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from quire import LLM, SamplingParams
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.engine.start.build import build_engine
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from tests.support.cases import in_turn, pairwise
from tests.support.models.reference_checkpoints import text_checkpoint
from tests.support.serve.fake_client import FakeClient

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def expected() -> tuple[list[str], list[str]]:
    """Return the texts of the best three of four beams, for a completion and for a chat."""
    params = SamplingParams(n=3, beam_width=4, use_beam_search=True, max_tokens=24)
    with LLM("demo", disable_log_stats=True) as llm:
        [text] = llm.generate([PROMPT], params, use_tqdm=False)
        [chat] = llm.chat(MESSAGES, params, use_tqdm=False)
    return [c.text for c in text.outputs], [c.text for c in chat.outputs]


BEAMS = {"use_beam_search": True, "beam_width": 4}


def test_completion_choices_equal_the_engines_beams(
    openai_client: openai.OpenAI, expected: tuple[list[str], list[str]]
) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, n=3, max_tokens=24, extra_body=BEAMS
    )
    assert [choice.text for choice in answer.choices] == expected[0]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_chat_choices_equal_the_engines_beams(
    openai_client: openai.OpenAI, expected: tuple[list[str], list[str]]
) -> None:
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
        ({**BEAMS, "beam_width": 9}, "beam_width"),
        ({**BEAMS, "length_penalty": -11}, "length_penalty"),
    ],
)
def test_invalid_beam_search_fields_are_refused(
    openai_client: openai.OpenAI, more: dict[str, object], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        openai_client.completions.create(model="demo", prompt=PROMPT, n=3, extra_body=more)
    assert refused.value.param is not None and refused.value.param.startswith(param)


NUM_CONTINUING = 4  # tokens of the small vocabulary that do not stop a beam in the tests below


@pytest.fixture(scope="module")
def small() -> Iterator[TestClient]:
    """A server whose model has a vocabulary of 424 tokens."""
    settings: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "disable_log_stats": True}
    template = "{{ messages[0].content }}"
    engine = build_engine(
        config_from_flat(
            model=str(text_checkpoint()), dtype="float64", chat_template=template, **settings
        )
    )
    parts = engine.renderer, engine.requests, ("small",)
    context = ApiContext(FakeClient(engine), *parts, ServerConfig(), 1_700_000_000)
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client
        assert context.client.num_unfinished == 0
    engine.client.close()


def search(client: TestClient, path: str, **more: Any) -> Any:
    """Run a beam search in which all but NUM_CONTINUING tokens stop a beam."""
    stops = list(range(NUM_CONTINUING, 424))
    body = {"use_beam_search": True, "ignore_eos": True, "stop_token_ids": stops} | more
    prompt = {"messages": [{"role": "user", "content": "The fox"}]}
    if path == "/v1/completions":
        prompt = {"prompt": ["The fox", "A fox"]}  # type: ignore[dict-item]
    return client.post(path, json=prompt | body)


PATHS = {"/v1/completions": 2, "/v1/chat/completions": 1}  # number of prompts for each path


@pytest.mark.parametrize(
    ("path", "early_stopping", "num_tokens"), pairwise(PATHS, [True, False, "never"], [1, 2, 30])
)
def test_as_many_beams_as_continuing_tokens_are_allowed(
    small: TestClient, path: str, early_stopping: bool | str, num_tokens: int
) -> None:
    answer = search(
        small, path, n=NUM_CONTINUING, max_tokens=num_tokens, early_stopping=early_stopping,
        return_token_ids=True,
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(PATHS[path] * NUM_CONTINUING))
    for start in range(0, len(choices), NUM_CONTINUING):
        of_prompt = choices[start : start + NUM_CONTINUING]
        assert len({tuple(choice["token_ids"]) for choice in of_prompt}) == NUM_CONTINUING
        for choice in of_prompt:
            stopped = choice["token_ids"][-1] >= NUM_CONTINUING
            assert choice["finish_reason"] == ("stop" if stopped else "length")
    used = sum(len(choice["token_ids"]) for choice in choices)
    assert answer.json()["usage"]["completion_tokens"] == used


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [{"n": 5}, {"n": 1, "beam_width": 5}])
def test_more_beams_than_continuing_tokens_are_refused(
    small: TestClient, path: str, more: dict[str, int]
) -> None:
    answer = search(small, path, max_tokens=2, **more)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == ("beam_width" if "beam_width" in more else "n")
    assert f"{NUM_CONTINUING} tokens" in error["message"]


@pytest.mark.parametrize(("path", "length_penalty"), in_turn(tuple(PATHS), [-10, 10]))
def test_extreme_length_penalties_give_all_choices(
    small: TestClient, path: str, length_penalty: int
) -> None:
    """Scores become very large or very small, and the engine keeps running."""
    answer = search(
        small, path, n=4, max_tokens=40, stop_token_ids=[], length_penalty=length_penalty
    )
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 4 * PATHS[path]
