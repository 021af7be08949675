"""Usage and limits of keys, through the app: the ledger's lines, and the rate limits.

Covers `serve/observers/observers.py` and `serve/http/rate_gate.py`.
"""

import asyncio
import http.client
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from starlette.testclient import TestClient

from quire.base.clock import FakeClock
from quire.base.settings.config import ServerConfig
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.observers.observers import Observers
from quire.serve.observers.rate_limits import RateLimits, make_memory
from tests.serve.api.conftest import MakeContext, serving
from tests.support.cases import slow_but
from tests.support.processes.servers import wait_until
from tests.support.serve.direct_engine import direct
from tests.support.serve.fake_client import FakeClient

KEYS = ("first-secret", "second-secret")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = [5, 6, 7, 8, 9]


def headers(key: int = 0) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[key]}"}


class Observed:
    """A context whose requests are observed. client: the engine's own client."""

    def __init__(self, context: ApiContext) -> None:
        self.context, self.clock = context, FakeClock(100.0)
        self.fd = make_memory(len(KEYS))
        config = context.config
        if config.rate_limits:
            context.rates = RateLimits(config.rate_limits, self.fd, self.clock)
        assert isinstance(context.client, FakeClient)
        self.client = context.client
        self.observers = Observers(self.client, config, "fox", context.rates)
        context.client = self.observers.client

    def close(self) -> None:
        asyncio.run(self.observers.close())
        os.close(self.fd)


@pytest.fixture
def ledger(make_context: MakeContext, tmp_path: Path) -> Iterator[Observed]:
    found = Observed(make_context(api_key=KEYS, usage_log=str(tmp_path / "usage")))
    yield found
    found.close()


def lines_of(observed: Observed, num: int) -> list[dict[str, Any]]:
    """Wait for `num` lines in the ledger; check that they hold no key."""
    path = Path(observed.context.config.usage_log or "")
    wait_until(lambda: path.read_text().count("\n") >= num)
    text = path.read_text()
    assert not any(key in text for key in KEYS)
    found = [json.loads(line) for line in text.splitlines()]
    assert len(found) == num
    return found


def test_ledger_has_a_line_with_the_usage_of_each_prompt(ledger: Observed) -> None:
    with TestClient(create_app(ledger.context)) as api:
        body = {"prompt": [PROMPT, [3, 4]], "max_tokens": 6, "n": 2, "seed": 3}
        answer = api.post(COMPLETIONS, json=body, headers=headers(1)).json()
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
        chat |= {"stream_options": {"include_usage": True}}
        stream = api.post(CHAT, json=chat, headers=headers(0))
    lines = lines_of(ledger, 3)
    assert [line["key"] for line in lines] == ["key 2", "key 2", "key 1"]
    assert {line["model"] for line in lines} == {"fox"}
    prompts = sorted(lines[:2], key=lambda line: line["request_id"])
    assert [line["request_id"] for line in prompts] == [f"{answer['id']}-{i}" for i in (0, 1)]
    assert [line["prompt_tokens"] for line in prompts] == [5, 2]
    usage = answer["usage"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert sum(line[name] for line in prompts) == usage[name]
    *_, last = [json.loads(e[6:]) for e in stream.text.split("\n\n") if "usage" in e]
    shown = last["usage"]
    assert lines[2]["prompt_tokens"] == shown["prompt_tokens"]
    assert lines[2]["completion_tokens"] == shown["completion_tokens"] == 3
    assert lines[2]["status"] == "length" and 0 < lines[2]["duration_s"] < 60
    assert lines[2]["time"].endswith("Z")


def test_ledger_reports_cached_tokens(ledger: Observed) -> None:
    prompt = list(range(100, 164))
    with TestClient(create_app(ledger.context)) as api:
        for _ in range(2):
            body = {"prompt": prompt, "max_tokens": 1}
            shown = api.post(COMPLETIONS, json=body, headers=headers()).json()["usage"]
    line = lines_of(ledger, 2)[1]
    assert line["cached_tokens"] == shown["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("stream", [True, False])
def test_ledger_reports_the_usage_of_disconnected_clients(ledger: Observed, stream: bool) -> None:
    """Without streaming no token was sent yet, so the engine reports the usage."""
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "stream": stream}
    with serving(ledger.context) as url:
        ledger.client.hold(after_steps=5)
        client = http.client.HTTPConnection(url.removeprefix("http://"))
        typed = headers() | {"Content-Type": "application/json"}
        client.request("POST", COMPLETIONS, json.dumps(body), typed)
        wait_until(lambda: ledger.client.is_held)
        if stream:
            assert client.getresponse().readline().startswith(b"data: ")
        client.close()
        ledger.client.release()
        [line] = lines_of(ledger, 1)
    assert line["status"] == "abort" and line["prompt_tokens"] == 5
    assert 1 <= line["completion_tokens"] < 400


def test_ledger_has_no_usage_for_requests_without_a_token(ledger: Observed) -> None:
    with TestClient(create_app(ledger.context), raise_server_exceptions=False) as api:
        api.post(COMPLETIONS, json={"prompt": PROMPT}, headers={"Authorization": "Bearer no"})
        api.post(COMPLETIONS, json={"prompt": PROMPT, "n": -1}, headers=headers())
        ledger.client.kill()
        api.post(COMPLETIONS, json={"prompt": PROMPT}, headers=headers())
    [line] = lines_of(ledger, 1)
    assert (line["status"], line["prompt_tokens"]) == ("engine_dead", 0)


def test_client_is_not_wrapped_without_observers(api_context: ApiContext) -> None:
    observers = Observers(api_context.client, ServerConfig(), "fox", None)
    assert observers.client is api_context.client


# ---- limits ------------------------------------------------------------------------------------


@pytest.fixture
def limited(make_context: MakeContext) -> Iterator[Observed]:
    found = Observed(
        make_context(api_key=KEYS, requests_per_minute=(3, 0), tokens_per_minute=(60, 0))
    )
    yield found
    found.close()


def left_of(limited: Observed) -> int:
    """Return the number of tokens that the first key has left."""
    assert limited.context.rates is not None
    return limited.context.rates.levels(0)["tokens"].num_left


def test_requests_per_minute_are_limited_per_key(limited: Observed) -> None:
    body = {"prompt": [5], "max_tokens": 1}
    with TestClient(create_app(limited.context)) as api:
        for left in (2, 1, 0):
            answer = api.post(COMPLETIONS, json=body, headers=headers())
            assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        refused = api.post(COMPLETIONS, json=body, headers=headers())
        assert refused.status_code == 429 and refused.headers["retry-after"] == "20"
        assert refused.headers["x-ratelimit-reset-requests"] == "1m0s"
        error = refused.json()["error"]
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert "limit of 3 requests per minute" in error["message"]
        assert api.get("/v1/models", headers=headers()).status_code == 200
        other = api.post(COMPLETIONS, json=body, headers=headers(1))
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        limited.clock.advance(20)
        assert api.post(COMPLETIONS, json=body, headers=headers()).status_code == 200


@pytest.mark.parametrize("stream", slow_but((False, True), True))
def test_tokens_per_minute_are_limited(limited: Observed, stream: bool) -> None:
    """105 tokens from a bucket of 60, refilled by one a second: wait for 45 of debt plus one."""
    body = {"prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": stream}
    assert len(direct(PROMPT, max_tokens=100, ignore_eos=True).outputs[0].token_ids) == 100
    with TestClient(create_app(limited.context)) as api:
        first = api.post(COMPLETIONS, json=body, headers=headers())
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-tokens"] == "60"
        refused = api.post(COMPLETIONS, json=body, headers=headers())
        assert refused.status_code == 429 and refused.headers["retry-after"] == "46"
        assert refused.json()["error"]["type"] == "tokens"
        assert refused.headers["x-ratelimit-reset-tokens"] == "1m45s"
        assert refused.headers["x-ratelimit-remaining-requests"] == "2"  # the refusal used none
        limited.clock.advance(46)
        refused = api.post(COMPLETIONS, json=body, headers=headers())
        assert refused.status_code == 429 and refused.headers["retry-after"] == "59"
        assert (
            "105" in refused.json()["error"]["message"]
        )  # more than a bucket holds: it must be full
        limited.clock.advance(59)
        assert api.post(COMPLETIONS, json=body, headers=headers()).status_code == 200


def test_open_requests_reserve_their_maximum_tokens(limited: Observed) -> None:
    """Three requests of up to 25 tokens do not fit into 60, even before any output."""
    body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
    limited.client.hold()
    with (
        serving(limited.context) as url,
        httpx.Client(base_url=url, headers=headers()) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        pending = [threads.submit(client.post, COMPLETIONS, json=body) for _ in range(2)]
        wait_until(lambda: left_of(limited) == 10)
        refused = client.post(COMPLETIONS, json=body)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "15"
        assert refused.headers["x-ratelimit-remaining-tokens"] == "10"
        limited.client.release()
        assert [each.result(30).status_code for each in pending] == [200, 200]
    assert left_of(limited) == 10


@pytest.mark.parametrize("stream", [False, True])
def test_unused_reserved_tokens_are_returned(limited: Observed, stream: bool) -> None:
    [output] = direct(PROMPT, max_tokens=40, temperature=0).outputs
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": stream}
    body["stop_token_ids"] = [output.token_ids[3]]
    num_written = output.token_ids.index(output.token_ids[3]) + 1
    with TestClient(create_app(limited.context)) as api:
        answer = api.post(COMPLETIONS, json=body, headers=headers())
        assert answer.status_code == 200 and answer.read()
    assert left_of(limited) == 60 - len(PROMPT) - num_written


def test_every_sequence_counts_against_the_limit(limited: Observed) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20, "n": 3, "seed": 1}
    assert limited.context.rates is not None
    limited.context.rates.charge(0, 10)
    with TestClient(create_app(limited.context)) as api:
        refused = api.post(COMPLETIONS, json=body, headers=headers())
        assert refused.status_code == 429
        assert "65 that this request" in refused.json()["error"]["message"]


def test_failed_request_returns_its_reserved_tokens(limited: Observed) -> None:
    with TestClient(create_app(limited.context), raise_server_exceptions=False) as api:
        limited.client.kill()
        answer = api.post(COMPLETIONS, json={"prompt": PROMPT}, headers=headers())
        assert answer.status_code == 503
        assert left_of(limited) == 60


def test_websocket_requests_are_limited(limited: Observed) -> None:
    start = {"type": "start", "prompt": [5], "last": True, "max_tokens": 1}
    with (
        TestClient(create_app(limited.context)) as api,
        api.websocket_connect("/v1/stream", headers=headers()) as socket,
    ):
        for _ in range(3):
            socket.send_json(start)
            while socket.receive_json()["type"] != "done":
                pass
        socket.send_json(start)
        error = socket.receive_json()
    assert error["type"] == "error" and error["error"]["code"] == "rate_limit_exceeded"


def test_without_keys_all_share_one_limit(make_context: MakeContext) -> None:
    found = Observed(make_context(requests_per_minute=(1,)))
    with TestClient(create_app(found.context)) as api:
        statuses = [
            api.post(COMPLETIONS, json={"prompt": [5], "max_tokens": 1, "user": user}).status_code
            for user in ("a", "b")
        ]
    assert statuses == [200, 429]
    found.close()
