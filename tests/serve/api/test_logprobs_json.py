"""Log-probabilities and echo of /v1/completions, in the shapes that lm-eval relies on."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers

import quire
from quire.base.requests.outputs import Logprob
from quire.serve.bodies.logprobs_json import TokenNames, chat_logprobs
from tests.support.serve.direct_engine import direct, twin

PROMPT = "Once upon a time"
DEMO = Path(quire.__file__).parent / "demo"


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send plain JSON without a client library, as lm-eval does."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def reference() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def logprobs_by_transformers(
    model: transformers.PreTrainedModel, token_ids: list[int]
) -> np.ndarray[Any, Any]:
    """Return [tokens - 1]: the logprob of each token but the first, given its predecessors."""
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    scores = torch.log_softmax(logits.float(), -1)
    return scores[range(len(token_ids) - 1), token_ids[1:]].numpy()


CONTEXTS = [[300, 301, 302, 310], [17, 400, 900], [20, 21, 22, 23, 24, 25, 26, 27, 28]]
CONTINUATIONS = [[500, 501], [600, 601, 602, 603], [700]]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_lm_eval_loglikelihoods_equal_transformers(
    server_url: str,
    reference: transformers.PreTrainedModel,
    max_tokens: int,
) -> None:
    """lm-eval sums token_logprobs[len(context):-1] and compares them with max(top_logprobs)."""
    prompts = [a + b for a, b in zip(CONTEXTS, CONTINUATIONS, strict=True)]
    body = {
        "model": "demo", "prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0,
        "max_tokens": max_tokens, "seed": 1234,
    }  # fmt: skip
    answer = post(server_url, body)
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)
    for index, (choice, prompt) in enumerate(zip(answer["choices"], prompts, strict=True)):
        logprobs = choice["logprobs"]
        assert choice["index"] == index
        assert {len(value) for value in logprobs.values()} == {len(prompt) + max_tokens}
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert "".join(logprobs["tokens"]) == choice["text"]
        num_prompt = len(prompt)
        expected = logprobs_by_transformers(reference, prompt)
        shown = logprobs["token_logprobs"][1:num_prompt]
        np.testing.assert_allclose(shown, expected, atol=0.5)  # the engine may run in bfloat16


def test_lm_eval_detects_the_greedy_continuation(server_url: str) -> None:
    """lm-eval compares floats for equality. Another continuation is not greedy."""
    start = twin().renderer.render_prompt(PROMPT)
    greedy = direct(PROMPT, max_tokens=6).outputs[0].token_ids
    for continuation, is_greedy in ((greedy, True), ([*greedy[:3], 900, 901], False)):
        body = {"prompt": [start + continuation], "echo": True, "logprobs": 1, "max_tokens": 1}
        logprobs = post(server_url, body)["choices"][0]["logprobs"]
        chosen = logprobs["token_logprobs"][len(start) : -1]
        tops = logprobs["top_logprobs"][len(start) : -1]
        assert len(chosen) == len(continuation)
        found = all(one == max(top.values()) for one, top in zip(chosen, tops, strict=True))
        assert found is is_greedy
        assert all(one in top.values() for one, top in zip(chosen, tops, strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_prepends_the_prompt_and_its_logprobs(
    openai_client: openai.OpenAI, stream: bool
) -> None:
    expected = direct(PROMPT, max_tokens=9, logprobs=2, prompt_logprobs=2)
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=9, temperature=0, echo=True, logprobs=2,
        stream=stream,
    )  # fmt: skip
    chunks = list(answer) if stream else [answer]
    choices = [chunk.choices[0] for chunk in chunks]
    assert "".join(choice.text for choice in choices) == PROMPT + expected.outputs[0].text
    tokens = [token for choice in choices for token in choice.logprobs.tokens]
    chosen = [value for choice in choices for value in choice.logprobs.token_logprobs]
    offsets = [value for choice in choices for value in choice.logprobs.text_offset]
    tops = [top for choice in choices for top in choice.logprobs.top_logprobs]
    token_ids = expected.prompt_token_ids + expected.outputs[0].token_ids
    positions = expected.prompt_logprobs + expected.outputs[0].logprobs
    assert chosen[0] is None
    assert chosen[1:] == [p[i].logprob for p, i in zip(positions[1:], token_ids[1:], strict=True)]
    assert all(2 <= len(top) <= 3 for top in tops[1:])
    text = PROMPT + expected.outputs[0].text
    for token, offset in zip(tokens, offsets, strict=True):
        assert text[offset : offset + len(token)] == token or token == "<|im_end|>"


@pytest.mark.parametrize("stream", [False, True])
def test_zero_max_tokens_without_echo_gives_an_empty_choice(
    openai_client: openai.OpenAI, stream: bool
) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=0, logprobs=1, stream=stream,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    (choice,) = [chunk.choices[0] for chunk in (list(answer) if stream else [answer])]
    assert (choice.text, choice.finish_reason) == ("", "length")
    assert choice.model_extra["token_ids"] == []
    assert choice.logprobs.tokens == []


def test_streamed_logprobs_equal_those_of_the_whole_response(openai_client: openai.OpenAI) -> None:
    arguments = {
        "model": "demo", "prompt": PROMPT, "max_tokens": 12, "seed": 4, "temperature": 1.2,
        "logprobs": 3,
    }  # fmt: skip
    whole = openai_client.completions.create(**arguments).choices[0].logprobs
    blocks = [
        chunk.choices[0].logprobs
        for chunk in openai_client.completions.create(**arguments, stream=True)
    ]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [item for block in blocks for item in getattr(block, name)]
        assert parts == getattr(whole, name)


def test_zero_logprobs_show_only_the_chosen_token(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=5, temperature=1.5, logprobs=0, seed=1
    )
    logprobs = answer.choices[0].logprobs
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top == {token: value}


def test_prompt_logprobs_equal_the_engines(openai_client: openai.OpenAI) -> None:
    expected = direct(PROMPT, max_tokens=1, prompt_logprobs=2)
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    shown = answer.choices[0].model_extra["prompt_logprobs"]
    assert shown[0] is None
    assert len(shown) == len(expected.prompt_token_ids)
    for position, theirs in zip(shown[1:], expected.prompt_logprobs[1:], strict=True):
        assert {int(k): v["logprob"] for k, v in position.items()} == {
            k: v.logprob for k, v in theirs.items()
        }
        assert {v["rank"] for v in position.values()} >= {1, 2}


def test_tokens_are_returned_as_token_ids(openai_client: openai.OpenAI) -> None:
    token_ids = direct(PROMPT, max_tokens=4).outputs[0].token_ids
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=1,
        extra_body={"return_tokens_as_token_ids": True},
    )  # fmt: skip
    assert answer.choices[0].logprobs.tokens == [f"token_id:{i}" for i in token_ids]


def test_tokens_with_the_same_text_have_separate_entries(openai_client: openai.OpenAI) -> None:
    """Tokens that are parts of characters all have an empty text."""
    partial = [199, 200, 201, 202, 203]
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=3, temperature=0, logprobs=5,
        extra_body={"allowed_token_ids": partial},
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert len(top) >= 5
        assert value in top.values()


def test_token_names_without_a_tokenizer_are_ids() -> None:
    names = TokenNames(None, as_ids=False)
    assert names.text(7, None) == "token_id:7"
    assert names.bytes(7, "é") == [0xC3, 0xA9]


def test_logprob_token_ids_select_the_shown_tokens(openai_client: openai.OpenAI) -> None:
    """In the requested order. Completions list them together with the chosen token."""
    named = [300, 5, 77]
    [expected] = direct(PROMPT, max_tokens=4, logprob_token_ids=named).outputs
    assert expected.logprobs is not None
    extra = {"logprob_token_ids": named, "return_tokens_as_token_ids": True, "temperature": 0}
    answer = openai_client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=4, extra_body=extra
    )
    block = answer.choices[0].logprobs
    assert block is not None and block.top_logprobs is not None
    for shown, position in zip(block.top_logprobs, expected.logprobs, strict=True):
        assert shown == {f"token_id:{i}": pytest.approx(e.logprob) for i, e in position.items()}
    chat = openai_client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=3,
        extra_body=extra,
    )
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    for entry in logprobs.content:
        others = [each.token for each in entry.top_logprobs]
        ids = [f"token_id:{token_id}" for token_id in named]
        assert others == [each for each in ids if each != entry.token] + (
            [entry.token] if entry.token in ids else []
        )


def test_top_token_ids_have_the_keys_of_top_logprobs(server_url: str) -> None:
    """Tokens may share a name, so a client that continues with one of them needs its id."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 5}
    assert "top_token_ids" not in post(server_url, body)["choices"][0]["logprobs"]
    choice = post(server_url, body | {"return_token_ids": True})["choices"][0]
    found = choice["logprobs"]
    for name, token_id, top, ids in zip(
        found["tokens"],
        choice["token_ids"],
        found["top_logprobs"],
        found["top_token_ids"],
        strict=True,
    ):
        assert top.keys() == ids.keys() and ids[name] == token_id
        assert len(set(ids.values())) == 5


@pytest.mark.parametrize(("num_top", "shown"), [(-1, 3), (0, 0), (2, 2)])
def test_chat_shows_all_top_tokens_for_a_negative_number(num_top: int, shown: int) -> None:
    position = {token_id: Logprob(-1.0 - token_id, token_id + 1, None) for token_id in range(3)}
    found = chat_logprobs(TokenNames(None, as_ids=True), [1], [position], num_top)
    tops = [each["token"] for each in found["content"][0]["top_logprobs"]]
    assert tops == [f"token_id:{token_id}" for token_id in range(shown)]
