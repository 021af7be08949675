"""Requests as Open WebUI, Continue, Cline, Zed and llama.vim send them, by their documentation.

These programs run in a browser or an editor, so their requests are written out here. Each case
sends the requests of one program in order.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clients.given import ASK, SEED, TOOLS, Served

Json = dict[str, Any]
BRIEF = {"seed": SEED, "num_predict": 8}
SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
USER = {"role": "user", "content": ASK}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": ASK}, {"type": "text", "text": "Go."}],
}


@pytest.fixture
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url.removesuffix("/v1"), timeout=60) as client:
        yield client


def read(http: httpx.Client, path: str) -> Any:
    return http.get(path).raise_for_status().json()


def lines(http: httpx.Client, path: str, body: Json) -> list[Json]:
    """Return the objects of a stream of lines."""
    answer = http.post(path, json=body).raise_for_status()
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def events(http: httpx.Client, path: str, body: Json) -> list[Json]:
    """Return the objects of a stream of server-sent events, without the end mark."""
    answer = http.post(path, json=body).raise_for_status()
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = [each.removeprefix("data: ") for each in answer.text.strip().split("\n\n")]
    return [json.loads(each) for each in found if each != "[DONE]"]


def test_open_webui_with_ollama(http: httpx.Client, server: Served) -> None:
    assert read(http, "/api/version")["version"]
    names = [each["model"] for each in read(http, "/api/tags")["models"]]
    assert server.model in names and read(http, "/api/ps")["models"]
    body: Json = {"model": names[0], "messages": [SYSTEM, USER], "options": BRIEF, "stream": True}
    *pieces, last = lines(http, "/api/chat", body)
    assert "".join(each["message"]["content"] for each in pieces)
    assert last["done"] and last["eval_count"] > 0 and last["eval_duration"] > 0
    # The request for a title.
    title = {"model": names[0], "messages": [USER], "stream": False, "options": BRIEF}
    assert http.post("/api/chat", json=title).raise_for_status().json()["message"]["content"]


def test_open_webui_with_openai(http: httpx.Client, server: Served) -> None:
    assert server.model in [each["id"] for each in read(http, "/v1/models")["data"]]
    body = {
        "model": server.model, "messages": [USER], "stream": True, "max_tokens": 8, "seed": SEED,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"X-OpenWebUI-User-Name": "fox", "X-OpenWebUI-Chat-Id": "1"}
    http.headers.update(headers)
    assert events(http, "/v1/chat/completions", body)[-1]["usage"]["completion_tokens"] <= 8


def test_continue_with_ollama(http: httpx.Client, server: Served) -> None:
    shown = http.post("/api/show", json={"name": server.model}).raise_for_status().json()
    assert "template" in shown and "parameters" in shown
    options = BRIEF | {"num_ctx": 32768, "temperature": 0.5, "stop": ["<|im_end|>"]}
    body: Json = {"model": server.model, "options": options, "stream": True, "keep_alive": 1800}
    assert lines(http, "/api/chat", body | {"messages": [SYSTEM, USER]})[-1]["done"]
    complete = body | {"prompt": "def add(a, b):", "raw": True}
    assert lines(http, "/api/generate", complete)[-1]["done"]
    fill = http.post("/api/generate", json=complete | {"suffix": "return c"})
    assert (fill.status_code == 200) == ("insert" in shown["capabilities"])


def test_continue_with_llamacpp(http: httpx.Client) -> None:
    body = {
        "prompt": "def add(a, b):", "n_predict": 8, "stream": True, "temperature": 0.5, "top_k": 40,
        "top_p": 0.9, "frequency_penalty": 0, "presence_penalty": 0, "mirostat": 0,
        "stop": ["\n\n\n"],
    }  # fmt: skip
    *pieces, last = events(http, "/completion", body)
    assert all(isinstance(each["content"], str) for each in pieces) and last["stop"]


def test_cline_with_openai(http: httpx.Client, server: Served) -> None:
    body: Json = {
        "model": server.model, "messages": [SYSTEM, PARTS], "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True}, "max_tokens": 8,
    }  # fmt: skip
    *chunks, last = events(http, "/v1/chat/completions", body)
    assert chunks[0]["choices"] and last["choices"] == [] and last["usage"]["prompt_tokens"] > 0


def test_cline_with_ollama_and_lm_studio(http: httpx.Client, server: Served) -> None:
    options = BRIEF | {"num_ctx": 32768}
    body = {"model": server.model, "messages": [SYSTEM, USER], "stream": True, "options": options}
    assert lines(http, "/api/chat", body)[-1]["prompt_eval_count"] > 0
    [model] = [e for e in read(http, "/api/v0/models")["data"] if e["id"] == server.model]
    assert model["type"] == "llm" and model["state"] == "loaded"
    assert model["max_context_length"] > 0


def test_zed_with_lm_studio(http: httpx.Client, server: Served) -> None:
    models = read(http, "/api/v0/models")["data"]
    assert {"arch", "publisher", "quantization", "compatibility_type"} <= models[0].keys()
    # -1 means what fits. The regex, which Zed does not send, ends the answers of weak models.
    body = {
        "model": server.model, "messages": [SYSTEM, USER], "stream": True, "max_tokens": -1,
        "stop": [], "temperature": 0.0, "regex": "[a-z]{4}",
    }  # fmt: skip
    chunks = events(http, "/api/v0/chat/completions", body)
    assert [each for each in chunks if "stats" in each]
    del body["regex"]
    body |= {"tools": TOOLS, "tool_choice": "auto", "max_tokens": 8}
    assert events(http, "/api/v0/chat/completions", body)


def test_zed_with_ollama(http: httpx.Client, server: Served) -> None:
    shown = http.post("/api/show", json={"model": server.model}).raise_for_status().json()
    assert shown["model_info"]["general.architecture"]
    body = {
        "model": server.model, "messages": [SYSTEM, USER], "stream": True, "keep_alive": -1,
        "options": BRIEF | {"num_ctx": 4096, "stop": [], "temperature": 1.0}, "tools": [],
    }  # fmt: skip
    assert lines(http, "/api/chat", body)[-1]["done"]


def test_llama_vim(http: httpx.Client, server: Served) -> None:
    body = {
        "id_slot": 0, "input_prefix": "def add(a, b):\n", "input_suffix": "    return c\n",
        "input_extra": [{"filename": "a.py", "text": "x = 1"}], "prompt": "    c", "n_predict": 16,
        "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": False,
        "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1000, "response_fields": [
            "content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached",
        ],
    }  # fmt: skip
    shown = http.post("/api/show", json={"model": server.model}).json()
    answer = http.post("/infill", json=body)
    if "insert" in shown["capabilities"]:
        assert "content" in answer.raise_for_status().json()
    else:
        assert answer.status_code == 400
        assert "fill-in-the-middle" in answer.json()["error"]["message"]
