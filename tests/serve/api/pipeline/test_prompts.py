"""Long texts delay no other request, because they are tokenised in threads."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from quire.engine.start.build import Engine
from quire.render.renderer import Renderer
from quire.render.tokens.tokenizer import Tokenizer
from quire.serve.app import create_app
from quire.serve.async_renderer import MAX_CHARS_SHORT, TextThreads
from quire.serve.context import ApiContext
from quire.serve.pipeline import prompts
from tests.serve.api.conftest import MODEL, MakeContext

LONG = "abc " * (MAX_CHARS_SHORT // 4 + 1)
USER = {"role": "user", "content": "Hello"}


class Gate:
    """A tokenizer that blocks on long texts until the test opens it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.is_reached, self.is_open = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > 1000:
            self._wait()
            text = text[:1000]
        return self._tokenizer.encode(text, add_special_tokens)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        if len(token_ids) > 1000:
            self._wait()
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def _wait(self) -> None:
        self.is_reached.set()
        assert self.is_open.wait(60)


@pytest.fixture
def gated(make_context: MakeContext) -> tuple[ApiContext, Gate]:
    context = make_context()
    tokenizer = context.renderer.tokenizer
    assert tokenizer is not None
    gate = Gate(tokenizer)
    context.renderer = Renderer(gate)  # type: ignore[arg-type]
    return context, gate


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [USER | {"content": LONG}]}),
        ("/detokenize", {"tokens": [5] * 300_000}),
        ("/v1/completions", {"prompt": LONG, "max_tokens": 1, "truncate_prompt_tokens": 5}),
        ("/v1/completions", {"prompt": [LONG, "Hi"], "max_tokens": 1, "truncate_prompt_tokens": 5}),
        (
            "/v1/chat/completions",
            {"messages": [USER | {"content": LONG}], "max_tokens": 1, "truncate_prompt_tokens": 5},
        ),
    ],
)
def test_requests_are_served_while_a_long_text_is_tokenised(
    gated: tuple[ApiContext, Gate],
    workers: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    """The gate opens only afterwards, so tokenising on the event loop would never end."""
    context, gate = gated
    monkeypatch.setattr(prompts, "MAX_CUT", 10**6)
    monkeypatch.setattr(prompts, "MAX_CHARS_PER_TOKEN", 10**6)
    with TestClient(create_app(context)) as api:
        slow = workers.submit(api.post, path, json={"model": MODEL} | body)
        assert gate.is_reached.wait(60)
        assert api.get("/health").status_code == 200
        answer = api.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
        assert answer.status_code == 200
        assert not slow.done()
        gate.is_open.set()
        assert slow.result(60).status_code == 200


def test_long_texts_beyond_the_limit_get_a_503_with_retry_after(
    gated: tuple[ApiContext, Gate], workers: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are refused without waiting; short prompts are still served."""
    context, gate = gated
    monkeypatch.setattr(prompts, "MAX_CUT", 10**6)
    monkeypatch.setattr(prompts, "MAX_CHARS_PER_TOKEN", 10**6)
    context.text_threads = TextThreads(max_open_chars=len(LONG))
    with TestClient(create_app(context)) as api:
        slow = workers.submit(api.post, "/tokenize", json={"prompt": LONG})
        assert gate.is_reached.wait(60)
        chat = {"messages": [{"role": "user", "content": LONG}]}
        bodies = {"tokenize": {"prompt": LONG}, "v1/completions": {"prompt": LONG}}
        for path, body in (bodies | {"v1/chat/completions": chat}).items():
            refused = api.post(f"/{path}", json=body)
            assert refused.status_code == 503, path
            assert refused.json()["error"]["code"] == "engine_busy"
            assert refused.json()["error"]["param"] is None
            assert int(refused.headers["retry-after"]) >= 1
        assert api.post("/tokenize", json={"prompt": "Hi"}).status_code == 200
        gate.is_open.set()
        assert slow.result(60).status_code == 200
        assert api.post("/tokenize", json={"prompt": LONG}).status_code == 200


def test_certainly_too_long_prompts_are_refused_untokenised(
    gated: tuple[ApiContext, Gate], engine: Engine
) -> None:
    """The gate never opens, so tokenising one of them would never end."""
    context, gate = gated
    with TestClient(create_app(context)) as api:
        for path, body in (
            ("/v1/completions", {"prompt": LONG}),
            ("/v1/completions", {"prompt": ["Hi", LONG]}),
            ("/v1/prefixes", {"prompt": LONG}),
            ("/v1/chat/completions", {"messages": [USER | {"content": LONG}]}),
            ("/tokenize", {"prompt": "x" * 1_000_000}),
        ):
            answer = api.post(path, json=body)
            assert answer.status_code == 400, path
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["param"] in body
            assert "too many" in error["message"] or "tokens or more" in error["message"]
    assert not gate.is_reached.is_set()


def test_chat_length_is_measured_without_a_thread(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context()
    with TestClient(create_app(context)) as api:
        monkeypatch.setattr(context.text_threads, "run", None)  # a thread would fail
        body = {"messages": [USER | {"content": LONG}] * 20}
        answer = api.post("/v1/chat/completions", json=body)
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_prompt_just_short_enough_is_served(api: TestClient, api_context: ApiContext) -> None:
    """The longest token many times: many characters, few tokens."""
    tokenizer = api_context.renderer.tokenizer
    assert tokenizer is not None
    token = max((tokenizer.decode([i]) for i in range(tokenizer.vocab_size)), key=len)
    text = token * 400
    count = len(tokenizer.encode(text))
    assert count < 512
    answer = api.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == count


def test_event_loop_runs_between_many_short_prompts(make_context: MakeContext) -> None:
    """Each is tokenised on the event loop, but 256 of them are as long as a long text."""
    context = make_context()
    tokenizer, turns, seen = context.renderer.tokenizer, list[int](), list[int]()
    assert tokenizer is not None

    class Watched(Gate):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            seen.append(len(turns))
            asyncio.get_running_loop().call_soon(turns.append, 1)
            return super().encode(text, add_special_tokens)

    context.renderer = Renderer(Watched(tokenizer))  # type: ignore[arg-type]
    with TestClient(create_app(context)) as api:
        body = {"prompt": ["Hi"] * 4, "max_tokens": 1}
        assert api.post("/v1/completions", json=body).status_code == 200
    assert seen == [0, 1, 2, 3]
