"""Requests to the native endpoints of llama.cpp's and SGLang's servers, as documented there."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.given import ASK, SEED, Served

STEPS = "Building a website can be done in 10 simple steps:"


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=60) as client:
        yield client


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    return http.post(path, json=body).raise_for_status().json()


def events(http: httpx.Client, path: str, **body: Any) -> list[Any]:
    text = http.post(path, json=body | {"stream": True}).raise_for_status().text
    found = [each.removeprefix("data: ") for each in text.strip().split("\n\n")]
    return [json.loads(each) for each in found if each != "[DONE]"]


# ---- llama.cpp -------------------------------------------------------------------------------


def test_completion(http: httpx.Client) -> None:
    fields = {"prompt": STEPS, "n_predict": 8, "seed": SEED}
    whole = post(http, "/completion", **fields)
    assert whole["stop"] and whole["tokens_predicted"] <= 8 and whole["timings"]["predicted_n"]
    *pieces, last = events(http, "/completion", **fields)
    assert "".join(each["content"] for each in pieces) == whole["content"] and last["stop"]


def test_constrained_completion(http: httpx.Client) -> None:
    found = post(http, "/completion", prompt=STEPS, grammar='root ::= "yes" | "no"', n_predict=8)
    assert found["content"] in ("yes", "no")
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    found = post(http, "/completion", prompt=STEPS, json_schema=schema, n_predict=60)
    assert json.loads(found["content"])["a"] in ("x", "y")


def test_probabilities(http: httpx.Client) -> None:
    found = post(http, "/completion", prompt=STEPS, n_probs=3, n_predict=4, temperature=0)
    for each in found["completion_probabilities"]:
        assert {"id", "token", "bytes", "logprob", "top_logprobs"} <= each.keys()
        assert len(each["top_logprobs"]) == 3


def test_tokens(http: httpx.Client) -> None:
    tokens = post(http, "/tokenize", content=STEPS, add_special=False)["tokens"]
    assert post(http, "/detokenize", tokens=tokens)["content"] == STEPS
    pieces = post(http, "/tokenize", content=STEPS, with_pieces=True)["tokens"]
    assert [each["id"] for each in pieces] == tokens
    found = post(http, "/completion", prompt=tokens, n_predict=2)
    assert found["tokens_evaluated"] == len(tokens)


def test_template_props_and_slots(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": ASK}]
    assert ASK in post(http, "/apply-template", messages=messages)["prompt"]
    props = http.get("/props").raise_for_status().json()
    assert props["total_slots"] == len(http.get("/slots").raise_for_status().json())
    assert props["chat_template"] and props["default_generation_settings"]["n_ctx"] > 0
    assert http.get("/health").status_code == 200


# ---- SGLang ----------------------------------------------------------------------------------


def test_generate(http: httpx.Client) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 8}
    whole = post(http, "/generate", text=STEPS, sampling_params=sampling)
    assert whole["meta_info"]["completion_tokens"] == len(whole["output_ids"]) <= 8
    # The documentation's loop prints the new part of the text of each chunk.
    printed, text = 0, ""
    for event in events(http, "/generate", text=STEPS, sampling_params=sampling):
        text += event["text"][printed:]
        printed = len(event["text"])
    assert text == whole["text"]


def test_generate_several_prompts(http: httpx.Client) -> None:
    several = {"temperature": 1, "max_new_tokens": 4, "n": 2}
    assert len(post(http, "/generate", text=[STEPS, ASK], sampling_params=several)) == 4
    sampling = {"temperature": 0, "max_new_tokens": 4}
    found = post(http, "/generate", text=[STEPS, ASK], sampling_params=sampling)
    ids = post(http, "/tokenize", prompt=STEPS)["tokens"]
    by_ids = post(http, "/generate", input_ids=ids, sampling_params=sampling)
    assert by_ids["text"] == found[0]["text"]


@pytest.mark.parametrize(
    ("constraint", "choices"),
    [({"regex": "(Paris|London)"}, ("Paris", "London")),
     ({"ebnf": 'root ::= "Hello" | "Hi"'}, ("Hello", "Hi")),
     ({"json_schema": json.dumps({"enum": ["a", "b"]})}, ('"a"', '"b"'))],
)  # fmt: skip
def test_constrained_generate(
    http: httpx.Client, constraint: dict[str, Any], choices: tuple[str, ...]
) -> None:
    sampling = {"max_new_tokens": 16} | constraint
    assert post(http, "/generate", text=STEPS, sampling_params=sampling)["text"] in choices


def test_logprobs(http: httpx.Client) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    sampling = {"temperature": 0, "max_new_tokens": 4}
    meta = post(http, "/generate", text=STEPS, sampling_params=sampling, **fields)["meta_info"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    assert len(meta["output_top_logprobs"][0]) == 2


def test_server_and_model_default(http: httpx.Client, server: Served) -> None:
    assert http.get("/get_model_info").json()["model_path"] == server.model
    assert http.get("/get_server_info").json()["context_length"] > 0
    assert http.get("/health_generate").status_code == 200
    assert http.post("/flush_cache").status_code == 200
    messages = [{"role": "user", "content": ASK}]
    chat = post(http, "/v1/chat/completions", model="default", messages=messages, max_tokens=4)
    assert chat["model"] == server.model
