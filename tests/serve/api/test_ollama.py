"""Ollama's API over HTTP, compared with the engine and with chat completions.

Covers `serve/ollama/`, `serve/ollama/models.py`, `serve/pipeline/text.py`. `make test-clients`
checks the API with Ollama's own client.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from httpx2 import Response
from starlette.testclient import TestClient

from quire.base.requests.hooks import HookCall, HookPiece
from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.hooks.hooks import Hooks
from quire.serve.ollama.as_chat import chat_messages
from tests.serve.api.conftest import MakeContext, small_engine
from tests.serve.api.test_embeddings import serving_model
from tests.support.models.pooling_checkpoints import pooling_checkpoint
from tests.support.serve.direct_engine import direct
from tests.support.serve.fake_client import FakeClient

HELLO: list[Any] = [{"role": "user", "content": "Hello, how are you?"}]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": CITY}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
MOOD = {
    "type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"],
    "additionalProperties": False,
}  # fmt: skip
GREEDY = {"temperature": 0, "num_predict": 60}
END = {
    "done": True, "done_reason": "stop", "prompt_eval_count": 17, "eval_count": 16,
}  # fmt: skip
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def shared(make_context: MakeContext) -> Iterator[TestClient]:
    """An app shared by the tests that do not change it."""
    with TestClient(create_app(make_context()), raise_server_exceptions=False) as client:
        yield client


def post(api: TestClient, path: str, **fields: Any) -> Response:
    options = fields.pop("options", {})
    options = GREEDY | options if isinstance(options, dict) else options
    return api.post(path, json={"model": "demo", "options": options} | fields)


def whole(api: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    response = post(api, path, stream=False, **fields)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def lines(api: TestClient, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = post(api, path, **fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def refused(response: Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    [(name, text)] = response.json().items()
    assert name == "error"
    return str(text)


def test_chat_streams_lines_and_ends_with_counts_and_durations(shared: TestClient) -> None:
    expected = direct(HELLO, max_tokens=60).outputs[0]
    *pieces, last = lines(shared, "/api/chat", messages=HELLO)
    assert "".join(piece["message"]["content"] for piece in pieces) == expected.text
    for piece in pieces:
        assert set(piece) == {"model", "created_at", "message", "done"} and not piece["done"]
        assert piece["message"]["role"] == "assistant" and piece["created_at"].endswith("Z")
    assert last | END == last and last["message"] == {"role": "assistant", "content": ""}
    assert all(isinstance(last[name], int) and last[name] > 0 for name in TIMES)
    assert last["total_duration"] >= last["eval_duration"]


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"messages": HELLO}, "stop"),
    ("/api/chat", {"messages": HELLO, "options": {"num_predict": 3}}, "length"),
    ("/api/chat", {"messages": HELLO, "options": {"stop": "thank"}}, "stop"),
    ("/api/chat", {"messages": HELLO, "format": MOOD}, "stop"),
    ("/api/chat", {"messages": HELLO, "think": False}, "stop"),
    ("/api/chat", {"messages": HELLO, "logprobs": True, "top_logprobs": 2}, "stop"),
    ("/api/chat", {"messages": QUESTION, "tools": TOOLS}, "stop"),
    ("/api/chat", {"messages": [*HELLO, {"role": "assistant", "content": "I am"}]}, "stop"),
    ("/api/generate", {"prompt": "Hello, how are you?", "system": "You are a fox."}, "stop"),
    ("/api/generate", {"prompt": "Once", "raw": True, "options": {"num_predict": 3}}, "length"),
    ("/api/generate", {"prompt": "Once", "raw": True, "format": MOOD, "logprobs": True}, "stop"),
]


@pytest.mark.parametrize(("path", "fields", "reason"), CASES)
def test_streamed_lines_assemble_to_the_whole_response(
    shared: TestClient, path: str, fields: dict[str, Any], reason: str
) -> None:
    one, several = whole(shared, path, **fields), lines(shared, path, **fields)
    texts: dict[str, Any] = {"content": "", "response": "", "logprobs": [], "tool_calls": []}
    for line in several:
        for name, value in (line | line.get("message", {})).items():
            if name in texts:
                texts[name] += value
    given = one | one.get("message", {})
    for call in [*texts["tool_calls"], *given.get("tool_calls", ())]:
        del call["id"]
    assert {name: given.get(name) or type(text)() for name, text in texts.items()} == texts
    assert one["done_reason"] == several[-1]["done_reason"] == reason
    assert one["eval_count"] == several[-1]["eval_count"]


def test_tool_call_is_one_line_with_object_arguments(shared: TestClient) -> None:
    found = lines(shared, "/api/chat", messages=QUESTION, tools=TOOLS)
    [calls] = [each["message"]["tool_calls"] for each in found if "tool_calls" in each["message"]]
    function = {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}
    assert [call["function"] for call in calls] == [function] and calls[0]["id"]


def test_tool_call_and_result_give_the_chat_completions_prompt(shared: TestClient) -> None:
    call = {"function": {"index": 0, "name": "get_weather", "arguments": {"city": "Paris"}}}
    result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [*QUESTION, calling, result]
    answer = whole(shared, "/api/chat", messages=messages, tools=TOOLS)
    arguments = json.dumps({"city": "Paris"})
    plain = {"id": "a", "type": "function", "function": call["function"] | {"arguments": arguments}}
    chat = {
        "messages": [*QUESTION, calling | {"tool_calls": [plain]}, result],
        "tools": TOOLS, "temperature": 0, "max_tokens": 60,
    }  # fmt: skip
    expected = shared.post("/v1/chat/completions", json=chat).json()
    assert answer["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]


def test_generated_call_ids_match_calls_to_results() -> None:
    call = {"function": {"name": "f", "arguments": {}}}
    calling = {"role": "assistant", "tool_calls": [call, call]}
    result = {"role": "tool", "tool_name": "f", "content": "1"}
    made = chat_messages([calling, result, result, calling, result])
    ids = [[each["id"] for each in made[index]["tool_calls"]] for index in (0, 3)]
    assert ids == [["call00000", "call00001"], ["call00002", "call00003"]]
    answered = [made[index]["tool_call_id"] for index in (1, 2, 4)]
    assert answered == ["call00000", "call00001", "call00002"] and made[1]["name"] == "f"
    wrong = {"role": "assistant", "tool_calls": 5.0}  # the renderer refuses it
    assert chat_messages([wrong, calling])[1]["tool_calls"][0]["id"] == "call00000"


def test_raw_prompt_skips_the_template_and_may_fill_the_context(shared: TestClient) -> None:
    expected = direct("Once upon a time", max_tokens=500).outputs[0]
    options = {"num_predict": -1}
    found = whole(shared, "/api/generate", prompt="Once upon a time", raw=True, options=options)
    assert found["response"] == expected.text and found["eval_count"] == len(expected.token_ids)


def test_num_predict_is_clamped_to_the_context(shared: TestClient) -> None:
    options = {"num_predict": 100_000}
    for path, fields in (
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "Hello", "raw": True}),
    ):
        assert whole(shared, path, **fields, options=options)["done"]


def test_empty_prompt_only_loads_the_model(shared: TestClient) -> None:
    for path, fields in (("/api/chat", {"messages": []}), ("/api/generate", {"keep_alive": 0})):
        found = post(shared, path, **fields).json()
        assert (found["done"], found["done_reason"]) == (True, "load")
        assert found.get("response", "") == "" and "eval_count" not in found


def test_json_body_is_read_with_any_content_type(shared: TestClient) -> None:
    body = json.dumps({"model": "demo:latest", "messages": HELLO, "stream": False})
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        answer = shared.post("/api/chat", content=body, headers={"content-type": kind})
        assert answer.status_code == 200 and answer.json()["model"] == "demo"


CALLING = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"options": {"mirostat": 2}}, "mirostat=2: quire does not support this way of sampling"),
    ({"options": {"typical_p": 0.7}}, "typical_p=0.7: "),
    ({"options": {"temperature": "hot"}}, 'options.temperature must be a number, got "hot".'),
    ({"options": {"temperature": -1}}, "temperature must be from 0 to 2"),
    ({"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}}, "options.repeat_last_n=64: "),
    ({"options": {"logit_bias": {"5": 1}}}, "logit_bias="),
    ({"options": 5}, "options must be an object"),
    ({"format": "yaml"}, "format must be"),
    ({"format": {"type": "nothing"}}, "format"),
    ({"think": True}, "think: the model demo does not reason"),
    ({"think": "hard"}, "think must be"),
    ({"messages": "hello"}, "messages must be a list"),
    ({"messages": [{"role": "user"}]}, "messages[0] needs a content"),
    ({"messages": [*HELLO, 5]}, "messages[1] must be an object"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images[0]"),
    ({"messages": [{"role": "user", "content": "x", "images": [5]}]}, "messages[0].images[0] must"),
    ({"messages": [{"role": "user", "content": "x", "images": "a"}]}, "messages[0].images must"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "tool_calls needs calls"),
    ({"messages": [{"role": "assistant", "tool_calls": 5.0}, CALLING]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "fox " * 600}]}, "messages: the prompt has"),
    ({"max_tokens": 5, "num_predict": 5}, "num_predict=5: use max_tokens"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_bad_chat_is_refused_with_a_reason(
    shared: TestClient, fields: dict[str, Any], reason: str
) -> None:
    assert refused(post(shared, "/api/chat", **{"messages": HELLO} | fields)).startswith(reason)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"context": [1]}, "context=[1]: send the earlier messages to /api/chat"),
        ({"template": "{{ .Prompt }}"}, "template="),
        ({"raw": True, "system": "x"}, "system needs the chat template"),
        ({"suffix": "end"}, "suffix: this model has no fill-in-the-middle tokens"),
        ({"steps": 5}, "steps=5: this server generates text only"),
    ],
)
def test_bad_generate_body_is_refused_with_a_reason(
    shared: TestClient, fields: dict[str, Any], reason: str
) -> None:
    assert refused(post(shared, "/api/generate", prompt="Hi", **fields)).startswith(reason)


def test_repeat_last_n_applies_the_penalty_to_all_text_or_none(
    api: TestClient, api_context: Any
) -> None:
    for last, penalty in ((None, 1.5), (-1, 1.5), (0, 1.0)):
        options = {"repeat_penalty": 1.5, "repeat_last_n": last, "num_predict": 1, "seed": -1}
        assert post(api, "/api/chat", messages=HELLO, options=options).status_code == 200
        assert api_context.client.requests[-1].params.repetition_penalty == penalty


def test_unknown_options_are_named_and_refused_only_in_strict_mode(
    shared: TestClient, strict: TestClient
) -> None:
    options = {"num_predict": 1, "num_ctx": 80, "typo": 1}
    answer = post(shared, "/api/chat", messages=HELLO, options=options)
    assert answer.headers["x-quire-ignored-fields"] == "options.typo"
    answer = post(strict, "/api/chat", messages=HELLO, options=options)
    assert refused(answer) == 'there is no option "typo"; remove it.'


def test_num_ctx_limits_the_prompt_plus_the_response(api: TestClient, api_context: Any) -> None:
    body: dict[str, Any] = {"messages": HELLO, "options": {"num_predict": 50, "num_ctx": 20}}
    body["stream"] = False
    num_prompt = post(api, "/api/chat", **body).json()["prompt_eval_count"]
    assert api_context.client.requests[-1].params.max_tokens == 20 - num_prompt
    for path, fields in (
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "Hello"}),
    ):
        error = refused(post(api, path, **fields, options={"num_ctx": 9}))
        assert "tokens, and num_ctx is 9, which must hold the answer as well" in error
        assert error.endswith("Shorten the prompt, or raise num_ctx.")
        answer = post(api, path, **fields, options={"num_predict": 1, "num_ctx": 1 << 20})
        assert answer.status_code == 200
        assert answer.headers["x-quire-ignored-fields"] == "options.num_ctx"
    full_context = {"num_predict": 1, "num_ctx": api_context.client.ready.max_model_len}
    answer = post(api, "/api/chat", messages=HELLO, options=full_context)
    assert "x-quire-ignored-fields" not in answer.headers
    raw = {"prompt": "Hello " * 30, "raw": True, "options": {"num_ctx": 9}}
    assert "and num_ctx is 9" in refused(post(api, "/api/generate", **raw))
    assert "num_ctx" in refused(post(api, "/api/chat", messages=HELLO, options={"num_ctx": 0}))


def test_unknown_models_and_paths_have_ollamas_errors(shared: TestClient) -> None:
    for path, fields in (
        ("/api/chat", {"messages": HELLO}), ("/api/show", {}), ("/api/pull", {}),
    ):  # fmt: skip
        answer = shared.post(path, json={"model": "llama3"} | fields)
        assert refused(answer, 404).startswith('there is no model "llama3" here; ')
    assert "quire serve MODEL" in refused(shared.post("/api/pull", json={"model": "a"}), 404)
    assert refused(shared.get("/api/nothing"), 404).startswith("there is no endpoint")
    assert refused(shared.post("/api/chat", content="{")).startswith("the body is not valid JSON")
    for method, path in (
        ("POST", "/api/create"), ("POST", "/api/push"), ("DELETE", "/api/delete"),
    ):  # fmt: skip
        text = refused(shared.request(method, path, json={"model": "demo"}), 501)
        assert text.startswith("quire serves the models that it was started with")


def test_pull_of_a_served_model_succeeds_immediately(shared: TestClient) -> None:
    streamed = shared.post("/api/pull", json={"name": "demo"})
    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert streamed.json() == {"status": "success"}
    assert shared.post("/api/pull", json={"model": "demo", "stream": False}).json() == {
        "status": "success"
    }


def test_models_are_listed_and_described(shared: TestClient) -> None:
    [listed] = shared.get("/api/tags").json()["models"]
    [running] = shared.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == "demo" and len(listed["digest"]) == 64
    assert running["context_length"] == 512 and running | listed == running
    shown = shared.post("/api/show", json={"model": "demo:latest"}).json()
    kind = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{kind}.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools"] and shown["details"]["families"]
    assert "<|im_start|>" in shown["template"] and "temperature" in shown["parameters"]
    assert set(shared.get("/api/version").json()) == {"version", "quire"}


# ---- reasoning, hooks, failures, embeddings --------------------------------------------------

THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker() -> Iterator[TestClient]:
    engine = small_engine(chat_template=THINKING)
    names, config = ("demo",), ServerConfig()
    context = ApiContext(FakeClient(engine), engine.renderer, engine.requests, names, config, 0)
    with TestClient(create_app(context), raise_server_exceptions=False) as client:
        yield client
    engine.client.close()


def test_reasoning_is_a_separate_field(thinker: TestClient) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "options": {"num_predict": 20}}
    message = whole(thinker, "/api/chat", **fields, think=True)["message"]
    assert message["thinking"] and message["content"] == ""
    pieces = lines(thinker, "/api/chat", **fields)
    streamed = "".join(each["message"].get("thinking", "") for each in pieces)
    assert streamed == message["thinking"]
    generated = whole(thinker, "/api/generate", prompt=HELLO[0]["content"], think="low",
                      options={"num_predict": 20})  # fmt: skip
    assert generated["thinking"] == message["thinking"] and generated["response"] == ""
    off = whole(thinker, "/api/chat", **fields, think=False)["message"]
    assert off["content"] and "thinking" not in off
    shown = thinker.post("/api/show", json={"model": "demo"}).json()
    assert "thinking" in shown["capabilities"]


class Upper:
    """A hook that upper-cases output and changes tool calls."""

    def on_output(self, piece: HookPiece) -> HookPiece:
        return replace(piece, text=piece.text.upper())

    def on_tool_call(self, call: HookCall) -> HookCall:
        return replace(call, arguments='{"city": "Rome"}')


def test_hooks_change_the_response(api: TestClient, api_context: ApiContext) -> None:
    api_context.hooks = Hooks([Upper()], 30.0)
    for path, fields in (
        ("/api/chat", {"messages": HELLO}),
        ("/api/generate", {"prompt": "Once upon a time", "raw": True}),
    ):
        one = whole(api, path, **fields)
        text = one["message"]["content"] if "message" in one else one["response"]
        assert text and text == text.upper()
    for line in lines(api, "/api/chat", messages=QUESTION, tools=TOOLS):
        for call in line["message"].get("tool_calls", ()):
            assert call["function"]["arguments"] == {"city": "Rome"}


def test_failing_stream_ends_with_an_error(api: TestClient, api_context: Any) -> None:
    api_context.client.hold(after_steps=3)
    body = {"messages": HELLO, "options": GREEDY}
    with api.stream("POST", "/api/chat", json=body) as answer:
        found = answer.iter_lines()
        assert json.loads(next(found))["message"]["content"]
        api_context.client.fail("the reason")
        *_, last = found
    assert json.loads(last) == {"error": "the request failed: the reason"}


@pytest.fixture(scope="module")
def embedder() -> Iterator[TestClient]:
    with serving_model(pooling_checkpoint("embed"), max_model_len=64) as app:
        yield app


def test_embeddings_match_the_openai_endpoint(embedder: TestClient) -> None:
    texts = ["a fox", "a dog and a cat"]
    expected = embedder.post("/v1/embeddings", json={"input": texts}).json()
    found = embedder.post("/api/embed", json={"model": "small", "input": texts}).json()
    assert found["embeddings"] == [each["embedding"] for each in expected["data"]]
    assert found["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    short = embedder.post("/api/embed", json={"input": "a fox", "dimensions": 4}).json()
    assert len(short["embeddings"][0]) == 4
    old = embedder.post("/api/embeddings", json={"model": "small", "prompt": "a fox"}).json()
    scale = sum(number**2 for number in old["embedding"]) ** 0.5
    assert [number / scale for number in old["embedding"]] == pytest.approx(found["embeddings"][0])


def test_requested_models_context_limit_applies(
    make_context: MakeContext, embedder: TestClient
) -> None:
    """The server has several models, and the requested name has a tag."""
    context = make_context()
    own = cast(FastAPI, embedder.app).state.context
    context.models = (
        context,
        context.with_model(own.client, own.renderer, own.requests, own.model_names),
    )
    assert context.client.ready.max_model_len > 70 > own.client.ready.max_model_len
    body = {"model": "small:latest", "input": "fox " * 200, "options": {"num_ctx": 70}}
    with TestClient(create_app(context), raise_server_exceptions=False) as app:
        answer = app.post("/api/embed", json=body)
        assert answer.json()["prompt_eval_count"] == 64
        assert answer.headers["x-quire-ignored-fields"] == "options.num_ctx"
        body = body | {"prompt": body["input"]}
        assert app.post("/api/embeddings", json=body).status_code == 200


def test_long_texts_are_truncated_unless_truncate_is_false(embedder: TestClient) -> None:
    long = {"input": "fox " * 200}
    assert embedder.post("/api/embed", json=long).status_code == 200
    assert "tokens" in refused(embedder.post("/api/embed", json=long | {"truncate": False}))
    cut = embedder.post("/api/embed", json=long | {"options": {"num_ctx": 5}}).json()
    assert cut["prompt_eval_count"] == 5
    assert embedder.post("/api/show", json={}).json()["capabilities"] == ["embedding"]
    assert "generates no text" in refused(
        post(embedder, "/api/chat", model="small", messages=HELLO)
    )
