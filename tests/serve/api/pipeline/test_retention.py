"""Caching hints: what they retain, for how long, and what the usage reports.

Covers `serve/pipeline/retention.py`, `serve/anthropic/cache_control.py`.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest
from starlette.testclient import TestClient

from quire.base.errors import EngineDead
from quire.scheduler.reuse import held
from quire.serve.context import ApiContext
from quire.serve.pipeline import retention

STORY = "Once upon a time, there was a fox who lived in the woods. " * 4
HELLO = {"role": "user", "content": STORY}
MARK = {"type": "ephemeral"}


@pytest.fixture(autouse=True)
def nothing_retained(api_context: Any) -> Iterator[None]:
    yield
    core = api_context.client.engine.client.core
    for each in core.held():
        api_context.client.engine.client.keep(each.id, 0.0)
    assert core.held() == []


def retained(context: Any) -> list[Any]:
    return list(context.client.engine.client.core.held())


def complete(api: TestClient, **fields: Any) -> dict[str, Any]:
    body = {"prompt": STORY, "max_tokens": 4, "temperature": 0} | fields
    response = api.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize(
    ("hint", "keep_s"),
    [
        ({"prompt_cache_key": "a"}, 600),
        ({"prompt_cache_key": "a", "prompt_cache_retention": "in_memory"}, 600),
        ({"prompt_cache_retention": "in-memory"}, 600),
        ({"prompt_cache_retention": "24h"}, 86400),
    ],
)
def test_caching_hint_retains_the_request(
    api: TestClient, api_context: ApiContext, hint: dict[str, str], keep_s: float
) -> None:
    chat = {"messages": [HELLO], "max_tokens": 2} | hint
    for path, body in (
        ("/v1/chat/completions", chat), ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/completions", {"prompt": STORY, "max_tokens": 2} | hint),
        ("/v1/responses", {"input": STORY, "max_output_tokens": 2} | hint),
    ):  # fmt: skip
        assert api.post(path, json=body).status_code == 200
        last = retained(api_context)[-1]
        assert last.keep_s == keep_s and keep_s - 60 < last.expires_in_s <= keep_s


def test_request_without_a_usable_hint_is_not_retained(
    api: TestClient, api_context: ApiContext
) -> None:
    for fields in (
        {}, {"prompt_cache_key": None}, {"prompt_cache_key": "a", "max_tokens": 0},
        {"prompt_cache_key": "a", "best_of": 2, "temperature": 1},
        {"prompt_cache_key": "a", "keep_s": 0},
    ):  # fmt: skip
        complete(api, **fields)
        assert retained(api_context) == []
    complete(api, prompt_cache_key="a", keep_s=5)
    assert [each.keep_s for each in retained(api_context)] == [5]


def test_responses_usage_counts_cache_writes(api: TestClient, api_context: ApiContext) -> None:
    api.post("/reset_prefix_cache")
    body = {"input": STORY, "max_output_tokens": 2, "prompt_cache_key": "a"}
    first, again = (api.post("/v1/responses", json=body).json()["usage"] for _ in range(2))
    details = first["input_tokens_details"]
    assert details == {"cached_tokens": 0, "cache_write_tokens": first["input_tokens"]}
    details = again["input_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == again["input_tokens"]
    assert details["cached_tokens"] > 0


def test_request_replaces_the_last_one_of_its_cache_key(
    api: TestClient, api_context: ApiContext
) -> None:
    first = complete(api, prompt_cache_key="a")
    second = complete(api, prompt_cache_key="a", prompt=STORY + first["choices"][0]["text"])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    [only] = retained(api_context)
    assert only.id.startswith(second["id"])
    complete(api, prompt_cache_key="b")
    complete(api, prompt_cache_key="a", user="other")
    complete(api, prompt_cache_key="a", cache_salt="mine")
    assert len(retained(api_context)) == 4
    complete(api, prompt_cache_retention="24h")
    complete(api, prompt_cache_retention="24h")
    assert len(retained(api_context)) == 6


def test_oldest_retained_requests_are_released_beyond_the_limit(
    api: TestClient, api_context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_RETAINED", 2)
    ids = [complete(api, prompt_cache_key=key)["id"] for key in ("a", "b", "a", "c")]
    found = [each.id.removesuffix("-0") for each in retained(api_context)]
    assert found == ids[2:]


class FakeClient:
    """A client that records the released requests. is_dead: its engine has ended."""

    def __init__(self, is_dead: bool = False) -> None:
        self.is_dead = is_dead
        self.released: list[str] = []

    async def keep(self, request_id: str, keep_s: float) -> None:
        assert keep_s == 0
        await asyncio.sleep(0)
        if self.is_dead:
            raise EngineDead("the model is not loaded.")
        self.released.append(request_id)


def test_dead_engine_does_not_break_requests_of_other_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "MAX_RETAINED", 1)
    dead, client = FakeClient(is_dead=True), FakeClient()

    async def run() -> None:
        store = retention.HintedRequests()
        await store.add(("a",), cast(Any, dead), "0")
        await store.add(("b",), cast(Any, client), "1")
        await store.release(("b",))

    asyncio.run(run())
    assert client.released == ["1"]


def test_concurrent_requests_of_one_cache_key_leave_one_retained() -> None:
    client = FakeClient()

    async def run() -> None:
        store = retention.HintedRequests()
        adds = (store.add(("a",), cast(Any, client), str(number)) for number in range(4))
        await asyncio.gather(*adds)

    asyncio.run(run())
    assert sorted(client.released) == ["0", "1", "2"]


def test_request_beyond_the_retention_limit_is_still_served(
    api: TestClient, api_context: ApiContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = complete(api)["choices"][0]["text"]
    complete(api, keep_s=60)
    complete(api, prompt_cache_key="a")
    monkeypatch.setattr(held, "MAX_RETAINED", 2)
    # The last request of the key makes room for this one.
    found = complete(api, prompt_cache_key="a")
    assert found["choices"][0]["text"] == plain
    assert any(each.id.startswith(found["id"]) for each in retained(api_context))
    monkeypatch.setattr(held, "MAX_RETAINED", 1)
    assert complete(api, prompt_cache_key="b")["choices"][0]["text"] == plain
    assert len(retained(api_context)) == 2  # unchanged
    body = {"prompt": STORY, "keep_s": 60}
    assert api.post("/v1/completions", json=body).status_code == 503  # an explicit keep_s fails


def test_failed_request_is_not_retained(api: TestClient, api_context: Any) -> None:
    complete(api, prompt_cache_key="a")
    [entry] = retained(api_context)
    body = {"prompt": STORY, "prompt_cache_key": "a", "timeout_s": 1e-9}
    assert api.post("/v1/completions", json=body).status_code == 408
    assert [each.id for each in retained(api_context)] == [entry.id]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_retention": "1w"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": 5}, "prompt_cache_retention"),
        ({"prompt_cache_key": "a" * 2000}, "prompt_cache_key"),
        ({"prompt_cache_key": {}}, "prompt_cache_key"),
    ],
)
def test_a_bad_hint_is_refused(api: TestClient, fields: dict[str, Any], param: str) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": [HELLO]}),
        ("/v1/responses", {"input": "a"}),
    ):  # fmt: skip
        response = api.post(path, json=body | fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param


# ---- Anthropic -------------------------------------------------------------------------------


def message(api: TestClient, **fields: Any) -> Any:
    body = {"model": "demo", "messages": [HELLO], "max_tokens": 4, "temperature": 0} | fields
    return api.post("/v1/messages", json=body)


def text(content: str = STORY, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content} | fields


@pytest.mark.parametrize(
    ("fields", "ttl"),
    [
        ({"cache_control": MARK}, "5m"),
        ({"system": [text("Be a fox.", cache_control=MARK | {"ttl": "1h"})]}, "1h"),
        ({"messages": [{"role": "user", "content": [text(cache_control=MARK)]}]}, "5m"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"},
                     "cache_control": MARK | {"ttl": "5m"}}]}, "5m"),
        ({"cache_control": MARK, "system": [text("a", cache_control=MARK | {"ttl": "1h"})]}, "1h"),
    ],
)  # fmt: skip
def test_marks_retain_a_message_and_usage_reports_it(
    api: TestClient, api_context: ApiContext, fields: dict[str, Any], ttl: str
) -> None:
    api.post("/reset_prefix_cache")
    usage = message(api, **fields).json()["usage"]
    written = usage["cache_creation_input_tokens"]
    assert written > 30 and usage["input_tokens"] == 0 and usage["cache_read_input_tokens"] == 0
    other = {"5m": "1h", "1h": "5m"}[ttl]
    assert usage["cache_creation"] == {
        f"ephemeral_{ttl}_input_tokens": written, f"ephemeral_{other}_input_tokens": 0,
    }  # fmt: skip
    [entry] = retained(api_context)
    assert entry.keep_s == {"5m": 300, "1h": 3600}[ttl]
    streamed = message(api, **fields, stream=True).text.split("\n\n")
    events = [json.loads(each.partition("data: ")[2]) for each in streamed if "data: " in each]
    for usage in (events[0]["message"]["usage"], events[-2]["usage"]):
        parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
        assert sum(usage[name] for name in parts) == written
        assert usage["cache_read_input_tokens"] > 0


def test_next_turn_replaces_the_last_one_wherever_the_mark_is(
    api: TestClient, api_context: ApiContext
) -> None:
    first = [{"role": "user", "content": [text(cache_control=MARK)]}]
    message(api, messages=first)
    later = [
        {"role": "user", "content": [text()]}, {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [text("Go on.", cache_control=MARK)]},
    ]  # fmt: skip
    usage = message(api, messages=later).json()["usage"]
    assert usage["cache_read_input_tokens"] > 30
    assert len(retained(api_context)) == 1
    message(api, messages=[{"role": "user", "content": [text("Another.", cache_control=MARK)]}])
    assert len(retained(api_context)) == 2


def test_message_without_a_mark_is_not_retained(api: TestClient, api_context: ApiContext) -> None:
    usage = message(api).json()["usage"]
    assert usage["cache_creation_input_tokens"] == 0 and usage["cache_creation"] is None
    assert retained(api_context) == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cache_control": {"type": "forever"}}, "cache_control"),
        ({"cache_control": MARK | {"ttl": "1d"}}, "cache_control.ttl"),
        ({"cache_control": 5}, "cache_control"),
        ({"system": [text("a", cache_control=[])]}, "system[0].cache_control"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [text(cache_control="x")]}
        ]}]}, "messages[0].content[0].content[0].cache_control"),
    ],
)  # fmt: skip
def test_a_bad_mark_is_refused(api: TestClient, fields: dict[str, Any], field: str) -> None:
    response = message(api, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"].startswith(f"{field} must")
