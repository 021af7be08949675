"""SGLang's native endpoints over HTTP, compared with the engine and with OpenAI's endpoints.

Covers `serve/sglang/`, `serve/pipeline/text.py`.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from quire.serve.app import create_app
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.context import ApiContext
from quire.serve.sglang import server
from quire.serve.sglang.as_completion import RENAMED, SAME, SAME_SAMPLING
from tests.serve.api.conftest import MakeContext
from tests.serve.api.test_embeddings import serving_model
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.serve.direct_engine import direct

STORY = "Once upon a time"
GREEDY = {"temperature": 0, "max_new_tokens": 8}


@pytest.fixture(scope="module")
def shared(make_context: MakeContext) -> Iterator[TestClient]:
    """An app shared by the tests that do not change it."""
    with TestClient(create_app(make_context()), raise_server_exceptions=False) as client:
        yield client


def post(api: TestClient, sampling: dict[str, Any] | None = None, **fields: Any) -> Response:
    body: dict[str, Any] = {"sampling_params": GREEDY | (sampling or {})} | fields
    return api.post("/generate", json=body)


def generated(api: TestClient, sampling: dict[str, Any] | None = None, **fields: Any) -> Any:
    response = post(api, sampling, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(response: Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    *events, end = response.text.strip().split("\n\n")
    assert end == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def error_of(response: Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert found["message"].endswith(".")
    return found


# ---- responses -------------------------------------------------------------------------------


def test_generate_matches_the_engine(shared: TestClient) -> None:
    expected = direct(STORY, max_tokens=8)
    found = generated(shared, text=STORY)
    assert found["text"] == expected.outputs[0].text
    assert found["output_ids"] == expected.outputs[0].token_ids
    meta = found["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 8)
    assert meta["e2e_latency"] > 0 and meta["id"].startswith("gen-")
    by_ids = generated(shared, input_ids=expected.prompt_token_ids)
    assert by_ids["output_ids"] == found["output_ids"]


def test_several_prompts_and_choices_are_an_ordered_list(shared: TestClient) -> None:
    texts = [STORY, "Hello", "Who are"]
    found = generated(shared, text=texts)
    assert [each["text"] for each in found] == [
        direct(text, max_tokens=8).outputs[0].text for text in texts
    ]
    assert len({each["meta_info"]["id"] for each in found}) == 3
    assert len(generated(shared, text=[STORY])) == 1
    ids = direct(STORY, max_tokens=1).prompt_token_ids
    assert generated(shared, input_ids=[ids])[0]["text"] == found[0]["text"]
    seeded = {"n": 3, "temperature": 1.0, "sampling_seed": 1, "min_new_tokens": 8}
    found = generated(shared, seeded, text=texts[:2])
    assert all(each["meta_info"]["completion_tokens"] == 8 for each in found)
    ids = [each["meta_info"]["id"] for each in found]  # request ids, which clients can abort
    assert [each.rpartition("-")[2] for each in ids] == ["0"] * 3 + ["1"] * 3
    assert len(generated(shared, seeded, text=texts[:2])) == 6


def test_first_and_last_events_have_the_prompt_logprobs(shared: TestClient) -> None:
    fields = {"text": STORY, "return_logprob": True, "logprob_start_len": 0}
    sampling = {"max_new_tokens": 40, "min_new_tokens": 40, "stream_interval": 4}
    expected = generated(shared, **fields)["meta_info"]["input_token_logprobs"]
    events = events_of(post(shared, sampling, stream=True, **fields))
    found = [each["meta_info"]["input_token_logprobs"] for each in events]
    assert len(found) > 2 and [found[0], found[-1]] == [expected, expected]
    assert not any(found[1:-1])


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        ({}, {}),
        ({"stop": [" a"]}, {}),
        ({"regex": "[a-z]{4}"}, {}),
        ({"max_new_tokens": 0}, {}),
        ({"stream_interval": 3}, {"return_logprob": True, "top_logprobs_num": 2}),
        ({"n": 2, "temperature": 1.0, "sampling_seed": 5}, {"text": [STORY, "Hello"]}),
    ],
)
def test_stream_events_repeat_the_text_from_the_start(
    shared: TestClient, sampling: dict[str, Any], fields: dict[str, Any]
) -> None:
    whole = generated(shared, sampling, **{"text": STORY} | fields)
    events = events_of(post(shared, sampling, **{"text": STORY} | fields, stream=True))
    last: dict[int, dict[str, Any]] = {}
    for event in events:
        index = event.pop("index", 0)
        before = last.get(index, {"text": "", "output_ids": []})
        assert event["text"].startswith(before["text"])
        assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[index] = event
    wholes = whole if isinstance(whole, list) else [whole]
    assert len(last) == len(wholes)
    for index, each in enumerate(wholes):
        for one in (each, last[index]):
            for name in ("id", "e2e_latency", "cached_tokens"):
                one["meta_info"].pop(name)
        assert last[index] == each


def test_finish_reason_names_the_matched_stop(shared: TestClient) -> None:
    end = generated(shared, {"stop": " a"}, text=STORY)["meta_info"]["finish_reason"]
    assert end == {"type": "stop", "matched": " a"}
    ids = direct(STORY, max_tokens=3).outputs[0].token_ids
    end = generated(shared, {"stop_token_ids": [ids[2]]}, text=STORY)["meta_info"]["finish_reason"]
    assert end == {"type": "stop", "matched": ids[2]}
    found = generated(shared, {"regex": "yes"}, text=STORY)
    assert found["meta_info"]["finish_reason"]["type"] == "stop" and found["text"] == "yes"
    trimmed = generated(shared, {"stop": " a"}, text=STORY)["text"]
    assert generated(shared, {"stop": " a", "no_stop_trim": True}, text=STORY)["text"] == (
        f"{trimmed} a"
    )


def test_logprobs_cover_output_and_prompt(shared: TestClient) -> None:
    names = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    found = generated(shared, text=STORY, logprob_start_len=0, **names)
    meta = found["meta_info"]
    assert [each[1] for each in meta["output_token_logprobs"]] == found["output_ids"]
    assert "".join(each[2] for each in meta["output_token_logprobs"]) == found["text"]
    for chosen, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert len(top) == 2 and top[0] == chosen and top[1][0] < chosen[0]
    prompt = meta["input_token_logprobs"]
    ids = direct(STORY, max_tokens=1).prompt_token_ids
    assert [each[1] for each in prompt] == ids and prompt[0][0] is None
    assert meta["input_top_logprobs"][0] is None
    assert all(len(each) == 2 for each in meta["input_top_logprobs"][1:])
    later = generated(shared, text=STORY, logprob_start_len=2, return_logprob=True)["meta_info"]
    assert [each[:2] for each in later["input_token_logprobs"]] == [p[:2] for p in prompt[2:]]
    assert later["input_token_logprobs"][0][2] is None and "input_top_logprobs" not in later
    plain = generated(shared, text=STORY, return_logprob=True)["meta_info"]
    assert plain["input_token_logprobs"] == [] and len(plain["output_token_logprobs"]) == 8
    assert "output_token_logprobs" not in generated(shared, text=STORY)["meta_info"]


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "(foo|bar)"}, "foo|bar"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"json_schema": '{"const": 5}'}, "5"),
        ({"json_schema": {"const": 5}}, "5"),
    ],
)
def test_output_matches_the_constraint(
    shared: TestClient, constraint: dict[str, Any], pattern: str
) -> None:
    assert re.fullmatch(pattern, generated(shared, constraint, text=STORY)["text"])


# ---- requests --------------------------------------------------------------------------------


def request_of(api: TestClient, context: Any, sampling: Any = None, **fields: Any) -> Any:
    generated(api, sampling, **{"text": STORY} | fields)
    return context.client.requests[-1]


def test_default_length_is_128_or_what_fits(api: TestClient, api_context: Any) -> None:
    response = api.post("/generate", json={"text": STORY})
    assert response.status_code == 200
    assert api_context.client.requests[-1].params.max_tokens == 128
    ids = [5] * 500
    assert api.post("/generate", json={"input_ids": ids}).status_code == 200
    assert api_context.client.requests[-1].params.max_tokens == 12
    assert error_of(post(api, {"max_new_tokens": 128}, input_ids=ids))["param"] == "max_new_tokens"


def test_errors_use_the_field_names_of_the_body(api: TestClient) -> None:
    error = error_of(post(api, {"min_new_tokens": 9, "max_new_tokens": 5}, input_ids=[5]))
    assert error["param"] == "min_new_tokens"
    assert "max_new_tokens=5" in error["message"] and " max_tokens" not in error["message"]
    error = error_of(post(api, {"max_new_tokens": 5}, input_ids=[5] * 600))
    assert "the prompt has 600 tokens" in error["message"]
    assert "truncate_prompt_tokens" not in error["message"]


def test_cache_salt_joins_both_fields(api: TestClient, api_context: Any) -> None:
    for fields, salt in (
        ({}, ""), ({"extra_key": "k"}, "k"), ({"cache_salt": "s", "extra_key": "k"}, "sk"),
    ):  # fmt: skip
        assert request_of(api, api_context, **fields).cache_salt == salt
    assert request_of(api, api_context, data_parallel_rank=0).core_id == 0


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"text": []}, "text"),
        ({"text": [STORY, 5]}, "text"),
        ({"text": [STORY] * 300}, "text"),
        ({"input_ids": [[5], []]}, "input_ids"),
        ({"input_ids": [5, True]}, "input_ids"),
        ({"input_ids": [1 << 40]}, "input_ids"),
        ({"input_ids": [5] * 600}, "input_ids"),
        ({"text": STORY * 600}, "text"),
        ({"text": STORY, "sampling_params": [GREEDY]}, "sampling_params"),
        ({"text": STORY, "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": STORY, "sampling_params": {"stop_regex": "a"}}, "stop_regex"),
        ({"text": STORY, "sampling_params": {"max_tokens": 5}}, "max_tokens"),
        ({"text": STORY, "sampling_params": {"regex": "("}}, "regex"),
        ({"text": STORY, "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
        ({"text": STORY, "sampling_params": {"mirostat": 2}}, "mirostat"),
        ({"text": STORY, "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": STORY, "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": STORY, "return_logprob": True, "top_logprobs_num": 999}, "top_logprobs_num"),
        ({"text": STORY, "image_data": "a.png"}, "image_data"),
        ({"text": STORY, "lora_path": "a"}, "lora_path"),
        ({"text": STORY, "return_hidden_states": True}, "return_hidden_states"),
        ({"text": STORY, "data_parallel_rank": 5}, "data_parallel_rank"),
        ({"inputs": STORY, "parameters": {"max_new_tokens": 3}}, "inputs"),
        ({"inputs": ""}, "inputs"),
        ({"text": STORY, "parameters": {"max_new_tokens": 3}}, "parameters"),
        ({"text": STORY, "model": "nobody"}, "model"),
    ],
    ids=str,
)
def test_a_bad_body_is_refused(shared: TestClient, body: dict[str, Any], param: str) -> None:
    status = 404 if param == "model" else 400
    assert error_of(shared.post("/generate", json=body), status)["param"] == param


def test_unknown_parameters_are_named_and_refused_only_in_strict_mode(
    shared: TestClient, strict: TestClient
) -> None:
    answer = post(shared, {"typo": 1}, text=STORY, other=2)
    assert answer.headers["x-quire-ignored-fields"] == "other, sampling_params.typo"
    assert error_of(post(strict, {"typo": 1}, text=STORY))["param"] == "sampling_params"


def test_all_translated_fields_exist() -> None:
    assert {*SAME, *SAME_SAMPLING, *RENAMED.values()} <= CompletionRequest.model_fields.keys()


# ---- the server ------------------------------------------------------------------------------


def test_default_is_an_alias_of_the_model(shared: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for path, body in (("/v1/chat/completions", chat), ("/generate", {"text": STORY})):
        assert shared.post(path, json=body | {"model": "default"}).status_code == 200
        error_of(shared.post(path, json=body | {"model": "defaults"}), 404)


def test_model_named_default_takes_precedence(make_context: MakeContext) -> None:
    app = create_app(make_context(served_model_name=("fox", "default")))
    with TestClient(app) as client:
        body = {"prompt": STORY, "max_tokens": 1, "model": "default"}
        assert client.post("/v1/completions", json=body).json()["model"] == "default"


def test_info_routes_describe_model_and_server(shared: TestClient) -> None:
    info = shared.get("/get_model_info").json()
    assert info == shared.get("/model_info").json()
    assert info["model_path"] == "demo" and info["is_generation"] is True
    about = shared.get("/get_server_info").json()
    assert about == shared.get("/server_info").json()
    assert (about["context_length"], about["max_running_requests"]) == (512, 8)
    assert about["status"] == "ready" and about["version"].startswith("quire ")


def test_flush_cache_empties_the_cache_for_admins_only(
    api: TestClient, make_context: MakeContext
) -> None:
    text = "The fox " * 40
    generated(api, text=text)
    assert generated(api, text=text)["meta_info"]["cached_tokens"] > 0
    flushed = api.post("/flush_cache")
    assert flushed.status_code == 200 and "Cache flushed" in flushed.text
    assert generated(api, text=text)["meta_info"]["cached_tokens"] == 0
    assert api.get("/flush_cache").status_code == 405  # any web page could send a GET
    with TestClient(create_app(make_context(api_key=("k",)))) as locked:
        assert locked.post("/flush_cache").status_code == 401
        error_of(locked.post("/flush_cache", headers={"x-api-key": "k"}), 403)


def test_health_generate_generates_one_token(
    api: TestClient, api_context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = api_context.client
    assert api.get("/health_generate").status_code == 200
    assert client.requests[-1].params.max_tokens == 1
    monkeypatch.setattr(server, "HEALTH_S", 1e-9)
    assert error_of(api.get("/health_generate"), 503)["code"] == "engine_busy"
    api_context.draining = True
    assert error_of(api.get("/health_generate"), 503)["code"] == "draining"


def test_pooling_model_refuses_generate(make_context: MakeContext) -> None:
    with serving_model(pooling_checkpoint("embed"), max_model_len=64) as client:
        assert client.get("/get_model_info").json()["is_generation"] is False
        assert client.get("/get_server_info").json()["is_embedding"] is True
        assert client.get("/health_generate").status_code == 200
        assert "generates no text" in error_of(post(client, text="fox"))["message"]
