"""llama.cpp's native endpoints over HTTP, compared with the engine and with OpenAI's endpoints.

Covers `serve/llamacpp/`, `serve/bodies/penalties.py`.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from quire.render import infill
from quire.render.infill import InfillTokens
from quire.serve.app import create_app
from quire.serve.bodies.protocol import CompletionRequest
from quire.serve.context import ApiContext
from quire.serve.llamacpp.as_completion import SAME, SAMPLERS
from quire.serve.llamacpp.writer import cut_at_indent
from tests.serve.api.conftest import MakeContext
from tests.serve.api.test_embeddings import serving_model
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.serve.direct_engine import direct
from tests.support.serve.fake_client import FakeClient

STORY = "Once upon a time"


@pytest.fixture(scope="module")
def shared(make_context: MakeContext) -> Iterator[TestClient]:
    """One app, shared by the tests that do not change it."""
    with TestClient(create_app(make_context()), raise_server_exceptions=False) as client:
        yield client


def post(api: TestClient, path: str = "/completion", **fields: Any) -> Response:
    return api.post(path, json={"temperature": 0, "n_predict": 8} | fields)


def completed(api: TestClient, **fields: Any) -> dict[str, Any]:
    response = post(api, **{"prompt": STORY} | fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def error_of(response: Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    assert found["message"].endswith(".")
    return found


def test_completion_reports_tokens_times_and_probabilities(shared: TestClient) -> None:
    expected = direct(STORY, max_tokens=8)
    found = completed(shared, return_tokens=True, n_probs=2)
    assert found["content"] == expected.outputs[0].text and found["prompt"] == STORY
    assert found["tokens"] == expected.outputs[0].token_ids
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert (found["tokens_predicted"], found["tokens_evaluated"]) == (8, 4)
    assert (
        found["generation_settings"] | {"n_predict": 8, "seed": -1, "stop": []}
        == found["generation_settings"]
    )
    times = found["timings"]
    assert times["prompt_n"] + times["cache_n"] == 4 and times["predicted_n"] == 8
    assert times["predicted_ms"] > 0 and times["predicted_per_second"] > 0
    probabilities = found["completion_probabilities"]
    assert [each["id"] for each in probabilities] == found["tokens"]
    for each in probabilities:
        best, second = each["top_logprobs"]
        assert best["id"] == each["id"] and best["logprob"] == each["logprob"] > second["logprob"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n_probs": 1},
        {"stop": [" a"]},
        {"n_predict": 0},
        {"grammar": 'root ::= "yes" | "no"'},
        {"prompt": "Hello", "n_predict": -1},
    ],
)
def test_stream_chunks_add_up_to_the_whole_response(
    shared: TestClient, fields: dict[str, Any]
) -> None:
    whole = completed(shared, return_tokens=True, **fields)
    text = post(shared, **{"prompt": STORY} | fields, stream=True).text
    events = [json.loads(each.removeprefix("data: ")) for each in text.strip().split("\n\n")]
    *pieces, last = events
    assert last["stop"] and not any(each["stop"] for each in pieces)
    assert "".join(each["content"] for each in events) == whole["content"]
    assert [i for each in events for i in each["tokens"]] == whole["tokens"]
    probabilities = [e for each in pieces for e in each.get("completion_probabilities", ())]
    assert probabilities == whole.get("completion_probabilities", [])
    for name in ("stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated"):
        assert last[name] == whole[name]


def test_stop_type_names_the_reason(shared: TestClient) -> None:
    assert completed(shared, stop=" a")["stop_type"] == "word"
    assert completed(shared, stop=[" a"])["stopping_word"] == " a"
    end = completed(shared, prompt=STORY, grammar='root ::= "yes"')
    assert (end["stop_type"], end["content"]) == ("eos", "yes")
    assert completed(shared, json_schema={"const": 5})["content"] == "5"


def test_prompt_accepts_several_forms(shared: TestClient) -> None:
    ids = direct(STORY, max_tokens=1).prompt_token_ids
    for prompt in ([STORY], ids, [ids], {"prompt_string": STORY}):
        assert completed(shared, prompt=prompt)["tokens_evaluated"] == 4
    assert completed(shared, prompt=STORY)["content"] == post(
        shared, "/completions", prompt=STORY
    ).json()["content"]  # fmt: skip
    for prompt in (None, "", [], [STORY, STORY], [1, STORY], [[]], 5, {"multimodal_data": ["a"]}):
        assert error_of(post(shared, prompt=prompt))["param"] == "prompt"


def test_response_fields_select_parts_of_the_response(shared: TestClient) -> None:
    names = ["content", "timings/predicted_n", "generation_settings/temperature", "nothing/at/all"]
    found = completed(shared, response_fields=names)
    assert found == {
        "content": direct(STORY, max_tokens=8).outputs[0].text, "predicted_n": 8, "temperature": 0,
    }  # fmt: skip


def params_of(api: TestClient, context: ApiContext, **fields: Any) -> Any:
    assert isinstance(context.client, FakeClient)
    completed(api, n_predict=1, **fields)
    return context.client.requests[-1].params


def test_unlisted_samplers_are_disabled(api: TestClient, api_context: ApiContext) -> None:
    given = {"top_k": 5, "top_p": 0.5, "min_p": 0.5, "repeat_penalty": 1.5, "temperature": 0.5}
    params = params_of(api, api_context, **given, samplers=["top_k", "infill"])
    assert (params.top_k, params.top_p, params.min_p) == (5, 1.0, 0.0)
    assert (params.repetition_penalty, params.temperature) == (1.0, 1.0)
    params = params_of(api, api_context, **given, samplers=[])
    assert (params.top_p, params.repetition_penalty, params.temperature) == (0.5, 1.5, 0.5)
    assert error_of(post(api, prompt=STORY, samplers=["x"]))["param"] == "samplers"


def test_logit_bias_accepts_several_forms(api: TestClient, api_context: ApiContext) -> None:
    tokenizer = api_context.renderer.tokenizer
    assert tokenizer is not None
    fox = tokenizer.encode("fox", add_special_tokens=False)
    pairs = [[5, 1.5], ["fox", -2], [7, False]]
    biased = params_of(api, api_context, logit_bias=pairs).logit_bias
    assert biased == {5: 1.5, **dict.fromkeys(fox, -2.0), 7: -100.0}
    assert params_of(api, api_context, logit_bias={"5": 1.5}).logit_bias == {5: 1.5}
    for wrong in (5, [5], [[5]], [[5, "a"]], [[5, True]], [[None, 1]], {"5": None}):
        assert error_of(post(api, prompt=STORY, logit_bias=wrong))["param"] == "logit_bias"


def test_repeat_last_n_covers_the_whole_text_or_nothing(
    api: TestClient, api_context: ApiContext
) -> None:
    for last, penalty in ((-1, 1.5), (0, 1.0), (None, 1.5)):
        params = params_of(api, api_context, repeat_penalty=1.5, repeat_last_n=last, seed=-1)
        assert params.repetition_penalty == penalty
    params_of(api, api_context, repeat_last_n=64)
    wrong = post(api, prompt=STORY, repeat_penalty=1.5, repeat_last_n=64)
    assert error_of(wrong)["param"] == "repeat_last_n"


# ---- infill ----------------------------------------------------------------------------------


@pytest.fixture
def with_infill(monkeypatch: pytest.MonkeyPatch, api_context: ApiContext) -> ApiContext:
    """The demo model, with some of its other special tokens as infill tokens."""
    names = InfillTokens("<|im_start|>", "<tool_call>", "</tool_call>", ("<|im_end|>",))
    monkeypatch.setattr(infill, "FAMILIES", (names,))
    return api_context


def test_infill_prompt_has_files_first_and_the_prompt_last(
    api: TestClient, with_infill: ApiContext
) -> None:
    tokenizer, client = with_infill.renderer.tokenizer, with_infill.client
    assert tokenizer is not None and isinstance(client, FakeClient)
    parts = {"input_prefix": "def f(x):", "input_suffix": "print(f(2))"}
    completion = {"prompt": "def f(x):", "suffix": "print(f(2))", "max_tokens": 1}
    assert api.post("/v1/completions", json=completion).status_code == 200
    middle = client.requests[-1].prompt_token_ids
    extra = [{"filename": "a.py", "text": "x = 1"}]
    # A body as llama.vim sends it.
    vim = {
        "input_extra": extra, "prompt": "  return", "n_predict": 4, "top_k": 40, "top_p": 0.9,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000, "n_indent": 4, "stream": False, "id_slot": 0,
        "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
    }  # fmt: skip
    found = post(api, "/infill", **parts, **vim)
    assert found.status_code == 200, found.text
    assert set(found.json()) == {"content", "prompt_n", "truncated", "tokens_cached"}
    before = tokenizer.encode("\n\n--- snippet ---\n\nx = 1", add_special_tokens=False)
    after = tokenizer.encode("  return", add_special_tokens=False)
    assert client.requests[-1].prompt_token_ids == [*before, *middle, *after]
    assert post(api, "/infill", input_prefix="a").status_code == 200  # without a suffix
    wrong = post(api, "/infill", **parts, n_indent=4, stream=True)
    assert error_of(wrong)["param"] == "n_indent"
    wrong = post(api, "/infill", **parts, input_extra=[{"text": 5}])
    assert error_of(wrong)["param"] == "input_extra"


def test_infill_needs_a_model_with_infill_tokens(shared: TestClient) -> None:
    assert error_of(post(shared, "/infill", input_prefix="a"))["code"] == "unsupported_value"


def test_text_is_cut_before_a_line_with_less_indentation() -> None:
    text = "x = 1\n    y = 2\n\n    z = 3\nend\n    more"
    assert cut_at_indent(text, 4) == "x = 1\n    y = 2\n\n    z = 3"
    assert cut_at_indent(text, 0) == text


# ---- errors and other endpoints --------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"n_indent": 4}, "n_indent"),
        ({"t_max_predict_ms": "x"}, "t_max_predict_ms"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        ({"temperature": -1}, "temperature"),
        ({"n_predict": "x"}, "n_predict"),
        ({"model": "nobody"}, "model"),
    ],
)
def test_invalid_fields_are_refused_by_name(
    shared: TestClient, fields: dict[str, Any], param: str
) -> None:
    status = 404 if param == "model" else 400
    assert error_of(post(shared, prompt=STORY, **fields), status)["param"] == param


SLOW = {"grammar": 'root ::= "a\\n" [a-z]{400}', "n_predict": 450}


@pytest.mark.parametrize("stream", [False, True])
def test_text_with_a_line_break_ends_at_its_time_limit(shared: TestClient, stream: bool) -> None:
    response = post(shared, prompt=STORY, stream=stream, t_max_predict_ms=1, **SLOW)
    assert response.status_code == 200, response.text
    last = json.loads(response.text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["stop_type"] == "limit" and last["has_new_line"]
    assert 1 < last["tokens_predicted"] < 400
    # A text of one line, and a text without a time limit, are not cut.
    one_line = "root ::= [a-z]{40}"
    assert (
        len(completed(shared, grammar=one_line, n_predict=60, t_max_predict_ms=1)["content"]) == 40
    )
    assert completed(shared, n_predict=4, t_max_predict_ms=-1)["tokens_predicted"] == 4


def test_props_and_slots_describe_the_server(shared: TestClient) -> None:
    props = shared.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["total_slots"] == 8
    assert "<|im_start|>" in props["chat_template"] and props["model_alias"] == "demo"
    slots = shared.get("/slots").json()
    assert len(slots) == 8 and not any(slot["is_processing"] for slot in slots)
    assert shared.get("/slots?fail_on_no_slot=1").status_code == 200
    for path in ("/props", "/slots/0?action=save"):
        error_of(shared.post(path, json={}), 501)
    assert shared.get("/models").json() == shared.get("/v1/models").json()


def test_open_requests_make_slots_busy(api: TestClient, api_context: ApiContext) -> None:
    api_context.num_open = 8
    error_of(api.get("/slots?fail_on_no_slot=1"), 503)
    assert all(slot["is_processing"] for slot in api.get("/slots").json())


def test_apply_template_returns_the_prompt(shared: TestClient) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "reasoning_format": "none"}
    text = shared.post("/apply-template", json=body).json()["prompt"]
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    body = {"messages": messages, "add_generation_prompt": False}
    assert shared.post("/apply-template", json=body).json()["prompt"] == text[:-22]
    error_of(shared.post("/apply-template", json={"messages": []}))


def test_tokenize_and_detokenize_use_llamacpps_format(shared: TestClient) -> None:
    text = "Hello \N{GRINNING FACE}"
    plain = shared.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    found = shared.post("/tokenize", json={"content": text}).json()
    assert found == {"tokens": plain["tokens"]}
    pieces = shared.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [each["id"] for each in pieces] == plain["tokens"]
    data = [each["piece"] for each in pieces]
    joined = b"".join(each.encode() if isinstance(each, str) else bytes(each) for each in data)
    assert joined.decode() == text and any(isinstance(each, list) for each in data)
    assert shared.post("/tokenize", json={"content": ""}).json() == {"tokens": []}
    assert shared.post("/detokenize", json={"tokens": plain["tokens"]}).json()["content"] == text
    both = shared.post("/tokenize", json={"content": "a", "prompt": "b"})
    assert "got prompt and content" in error_of(both)["message"]
    wrong = shared.post("/tokenize", json={"content": "a", "parse_special": False})
    assert error_of(wrong)["param"] == "parse_special"


@pytest.fixture(scope="module")
def embedder() -> Iterator[TestClient]:
    with serving_model(pooling_checkpoint("embed"), max_model_len=64) as app:
        yield app


def test_embedding_returns_a_list_of_one_vector_per_text(embedder: TestClient) -> None:
    texts = ["a fox", "a dog"]
    expected = embedder.post("/v1/embeddings", json={"input": texts}).json()["data"]
    found = embedder.post("/embedding", json={"content": texts}).json()
    assert [each["embedding"] for each in found] == [[each["embedding"]] for each in expected]
    [plain] = embedder.post("/embedding", json={"input": "a fox", "embd_normalize": -1}).json()
    assert sum(number**2 for number in plain["embedding"][0]) != pytest.approx(1)
    for wrong in ({}, {"content": "a", "input": "b"}, {"content": []}):
        error_of(embedder.post("/embedding", json=wrong))


def test_forwarded_fields_exist_in_completion_requests() -> None:
    switched = {name for fields in SAMPLERS.values() for name in fields}
    assert switched | set(SAME) <= CompletionRequest.model_fields.keys()
