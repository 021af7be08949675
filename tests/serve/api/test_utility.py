"""Utility routes: models, tokenization, health, load, metrics and the OpenAPI document."""

import copy
import threading
import warnings
from typing import Any

import jsonschema
import openai
import pytest
from starlette.testclient import TestClient

import quire
from quire.render.generation import GenerationDefaults
from quire.render.renderer import Renderer
from quire.serve.app import create_app
from quire.serve.async_renderer import MAX_CHARS_ON_LOOP, size_of, size_within
from quire.serve.context import ApiContext
from quire.serve.errors import ApiError
from quire.serve.native.document import PUBLIC
from quire.serve.pipeline.plan import check_model, checked_template
from tests.serve.api.conftest import MODEL, MakeContext
from tests.support.serve.fake_client import FakeClient

MESSAGES = [{"role": "user", "content": "Hello there"}]


def fake(context: ApiContext) -> FakeClient:
    assert isinstance(context.client, FakeClient)
    return context.client


def test_official_client_lists_and_retrieves_models(openai_client: openai.OpenAI) -> None:
    (model,) = openai_client.models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "quire")
    assert model.created == 1_700_000_000
    assert model.model_dump()["max_model_len"] == 512
    assert openai_client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"
    assert MODEL in caught.value.message


def test_model_card_has_the_sampling_defaults(make_context: MakeContext) -> None:
    """The model's own defaults, and the server's where it has none."""
    context = make_context()
    defaults = GenerationDefaults(sampling={"temperature": 0.25, "top_k": 7, "max_tokens": 3})
    context.requests = copy.copy(context.requests)
    context.requests.defaults = defaults
    [card] = TestClient(create_app(context)).get("/v1/models").json()["data"]
    assert card["default_sampling_params"] == {
        "temperature": 0.25, "top_p": 1.0, "top_k": 7, "min_p": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip


def test_served_names_replace_the_model_path(make_context: MakeContext) -> None:
    context = make_context(served_model_name=("short", "org/long"))
    api = TestClient(create_app(context))
    cards = api.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["short", "org/long"]
    assert {card["root"] for card in cards} == {MODEL}
    assert api.get("/v1/models/org/long").json() == cards[1]
    assert api.get("/v1/models/").json()["data"] == cards
    assert check_model(context, None) == "short"
    assert check_model(context, "org/long") == "org/long"
    with pytest.raises(ApiError) as caught:
        check_model(context, MODEL)
    assert (caught.value.status, caught.value.param) == (404, "model")
    assert "short, org/long" in caught.value.message
    assert api.post("/tokenize", json={"prompt": "a", "model": MODEL}).status_code == 404


def test_only_admin_keys_see_the_model_path(make_context: MakeContext) -> None:
    names, keys = ("short",), ("user", "admin")
    context = make_context(served_model_name=names, api_key=keys, admin_api_key=keys[1:])
    api = TestClient(create_app(context))
    for path in ("/v1/models/short", "/v1/models"):
        for key, root in (("user", "short"), ("admin", MODEL)):
            answer = api.get(path, headers={"Authorization": f"Bearer {key}"}).json()
            assert answer.get("data", [answer])[0]["root"] == root


def test_tokenize_and_detokenize_a_text(api: TestClient, api_context: ApiContext) -> None:
    answer = api.post("/tokenize", json={"prompt": "Hello", "return_token_strs": True}).json()
    tokenizer = api_context.renderer.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("Hello")
    assert answer == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": tokenizer.tokens(ids),
    }
    assert api.post("/detokenize", json={"tokens": ids}).json() == {
        "prompt": "Hello", "content": "Hello",
    }  # fmt: skip


def test_tokenize_a_conversation(api: TestClient, api_context: ApiContext) -> None:
    render = api_context.renderer.render
    answer = api.post("/tokenize", json={"messages": MESSAGES}).json()
    assert answer["tokens"] == render(MESSAGES).token_ids
    assert answer["token_strs"] is None
    shorter = api.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False})
    assert 0 < shorter.json()["count"] < answer["count"]
    text = api.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == render(MESSAGES).text


def test_tokenize_continues_the_final_message(api: TestClient) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Good"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    tokens = api.post("/tokenize", json=body).json()["tokens"]
    text = api.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("Good")
    both = api.post("/tokenize", json=body | {"add_generation_prompt": True})
    assert both.status_code == 400


def test_tokenize_and_detokenize_accept_empty_input(api: TestClient) -> None:
    for special in (True, False):
        body = {"prompt": "", "add_special_tokens": special}
        answer = api.post("/tokenize", json=body)
        assert answer.status_code == 200
        assert answer.json()["count"] == len(answer.json()["tokens"])
    assert api.post("/detokenize", json={"tokens": []}).json() == {
        "prompt": "", "content": "",
    }  # fmt: skip


@pytest.mark.parametrize("token_id", [-1, 10**6, 10**30])
def test_ids_outside_of_the_vocabulary_are_refused(api: TestClient, token_id: int) -> None:
    response = api.post("/detokenize", json={"tokens": [1, token_id]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens"
    assert f"got {token_id}" in response.json()["error"]["message"]


def test_missing_tokenizer_is_a_400(make_context: MakeContext) -> None:
    context = make_context()
    context.renderer = Renderer(None)
    api = TestClient(create_app(context))
    answers = [
        api.post("/tokenize", json={"prompt": "a"}),
        api.post("/detokenize", json={"tokens": [1]}),
        api.get("/tokenizer_info"),
    ]
    for response in answers:
        assert response.status_code == 400
        assert "no tokenizer" in response.json()["error"]["message"]


def test_long_prompts_are_tokenised_off_the_event_loop(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context()
    threads: list[int] = []
    render = context.renderer.render

    def recorded(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return render(*arguments)

    monkeypatch.setattr(context.renderer, "render", recorded)
    with TestClient(create_app(context)) as api:
        for text in ("a", "a " * MAX_CHARS_ON_LOOP, "a"):
            assert api.post("/tokenize", json={"prompt": text}).status_code == 200
    assert threads[0] == threads[2] != threads[1]


def test_absurdly_long_prompt_is_refused(api: TestClient) -> None:
    response = api.post("/tokenize", json={"prompt": "a" * 200_000})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_size_counts_characters_and_values() -> None:
    assert size_of("abc") == 3
    assert size_of([1, 2, 3]) == 3
    assert size_of({"prompt": "abc"}) == 6 + 1 + 3
    assert size_of([1, "abc"]) == 2 + 3
    assert size_of([10**3000]) > 3000
    content = [{"type": "text", "text": "x" * 100}]
    messages = [{"role": "user", "content": content}]
    assert size_of(messages) == 1 + 13 + 4 + 1 + 10 + 4 + 100
    assert size_within(messages, 1000, max_values=6) == size_of(messages)
    assert size_within(messages, 1000, max_values=5) is None
    assert size_within([0] * 1000, 10**6, max_values=999) is None


def test_request_templates_need_trust_and_are_never_paths(make_context: MakeContext) -> None:
    """A path is never read as a file, even if templates of requests are trusted."""
    text = "{{ messages[0].content }}"
    with pytest.raises(ApiError, match="templates from requests are disabled"):
        checked_template(make_context(), text)
    trusting = make_context(trust_request_chat_template=True)
    assert checked_template(trusting, text) == text
    assert checked_template(trusting, None) is None
    with pytest.raises(ApiError, match="text of a template"):
        checked_template(trusting, "/etc/passwd")
    tokenizer = trusting.renderer.tokenizer
    assert tokenizer is not None
    name = next(iter(tokenizer.chat_templates))
    assert checked_template(make_context(), name) == name
    api = TestClient(create_app(trusting))
    answer = api.post("/tokenize", json={"messages": MESSAGES, "chat_template": text}).json()
    assert answer["tokens"] == tokenizer.encode("Hello there", add_special_tokens=False)


def statuses(api: TestClient) -> list[int]:
    return [
        api.get("/health").status_code,
        api.get("/ping").status_code,
        api.post("/ping").status_code,
        api.get("/ready").status_code,
    ]


def test_health_and_readiness_follow_drain_and_engine_death(
    api: TestClient, api_context: ApiContext
) -> None:
    assert statuses(api) == [200, 200, 200, 200]
    assert api.get("/health").content == b""
    api_context.draining = True
    assert statuses(api) == [200, 200, 200, 503]
    api_context.draining = False
    fake(api_context).kill()
    assert statuses(api) == [503, 503, 503, 503]


def test_version_load_and_metrics_are_served(api: TestClient, api_context: ApiContext) -> None:
    assert api.get("/version").json() == {"version": quire.__version__}
    assert api.get("/load").json() == {"server_load": 0}
    api_context.num_open = 3
    assert api.get("/load").json() == {"server_load": 3}
    response = api.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "quire:num_requests_running 0.0\n" in response.text


def test_metrics_of_a_dead_engine_are_a_503(api: TestClient, api_context: ApiContext) -> None:
    fake(api_context).kill()
    response = api.get("/metrics")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"
    assert "retry-after" in response.headers


def test_schema_lists_the_routes(api: TestClient) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warns of names that two routes share
        paths = api.get("/openapi.json").json()["paths"]
    assert {"/v1/models", "/tokenize", "/detokenize", "/health", "/metrics"} <= set(paths)
    assert api.get("/redoc").status_code == 404


def test_docs_page_is_self_contained_and_needs_no_key(
    make_context: MakeContext,
) -> None:
    """The page is served without a key, because browsers send none; it asks the user for one."""
    api = TestClient(create_app(make_context(api_key=("k",))))
    page = api.get("/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert 'fetch("openapi.json"' in page.text
    for word in ("http:", "https:", "src=", "url(", "@import"):
        assert word not in page.text


def test_openapi_document_lists_statuses_and_schemas(api: TestClient) -> None:
    document = api.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "Error" in schemas and "HTTPValidationError" not in schemas
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            statuses = set(operation["responses"])
            assert "422" not in statuses
            assert {"200", "503"} <= statuses, (method, path)
            assert ({"400", "408", "413", "415"} <= statuses) == ("requestBody" in operation)
            if path not in PUBLIC:
                described = operation["responses"]["200"]["content"]
                assert all(content["schema"] for content in described.values()), (method, path)
    assert "securitySchemes" not in document["components"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"max_tokens": 1}}),
    ],
)
def test_responses_match_the_openapi_schema(
    api: TestClient, path: str, body: dict[str, Any]
) -> None:
    described = api.get("/openapi.json").json()["paths"][path]["post"]["responses"]["200"]
    answer = api.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200
    jsonschema.validate(answer.json(), described["content"]["application/json"]["schema"])


def test_openapi_document_marks_routes_that_need_a_key(make_context: MakeContext) -> None:
    api = TestClient(create_app(make_context(api_key=("k",))))
    document = api.get("/openapi.json", headers={"Authorization": "Bearer k"}).json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            is_public = path in PUBLIC
            assert ("401" in operation["responses"]) == ("security" in operation) == (not is_public)
