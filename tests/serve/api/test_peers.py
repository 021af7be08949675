"""Requests for responses that another API process stores are forwarded with their key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.peers import Peers
from quire.serve.responses.store import Responses, process_of
from tests.serve.api.conftest import MakeContext, serving, small_engine
from tests.support.serve.fake_client import FakeClient
from tests.support.serve.official_types import GREEDY, PATH, Json, events_in

MINE, THEIRS = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
BODY: Json = GREEDY | {"input": "Hello", "max_output_tokens": 6}


def of_two(context: ApiContext, number: int, home: Path) -> ApiContext:
    context.peers = Peers(number, 2, home)
    context.responses = Responses(1 << 20, number)
    return context


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def other(make_context: MakeContext, home: Path) -> Iterator[TestClient]:
    """Process 1, which listens for other processes. The tests also call it directly."""
    context = of_two(make_context(api_key=("one", "two"), root_path="/there"), 1, home)
    context.client = FakeClient(small_engine())
    listener = context.peers.listener()
    assert listener is not None
    with serving(context, listener), TestClient(create_app(context)) as client:
        yield client


@pytest.fixture
def first(make_context: MakeContext, home: Path) -> Iterator[TestClient]:
    """Process 0, behind a proxy's path."""
    context = of_two(make_context(api_key=("one", "two")), 0, home)
    app = create_app(context)
    with TestClient(app, raise_server_exceptions=False, root_path="/quire") as client:
        yield client


@pytest.fixture(scope="module")
def stored(other: TestClient) -> Json:
    """A response that process 1 stores."""
    found: Json = other.post(PATH, json=BODY, headers=MINE).json()
    assert process_of(found["id"]) == 1
    return found


def test_response_of_another_process_is_returned(first: TestClient, stored: Json) -> None:
    path = f"{PATH}/{stored['id']}"
    answer = first.get(path, headers=MINE | {"X-Request-Id": "mine"})
    assert (answer.status_code, answer.json()) == (200, stored)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "mine"
    items = first.get(f"{path}/input_items?limit=1&order=asc", headers=MINE).json()
    assert items["data"][0]["content"][0]["text"] == "Hello"
    assert (
        first.get(f"{path}/input_items?limit=0", headers=MINE).json()["error"]["param"] == "limit"
    )
    assert first.post(f"{path}/cancel", headers=MINE, json={}).status_code == 400


def test_forwarded_requests_check_the_key(first: TestClient, stored: Json) -> None:
    path = f"{PATH}/{stored['id']}"
    assert first.get(path).status_code == 401
    assert first.post(f"{path}/cancel", json={"much": "x" * 9999}).status_code == 401
    assert first.get(path, headers=THEIRS).status_code == 404
    body = BODY | {"previous_response_id": stored["id"]}
    assert first.post(PATH, json=body, headers=THEIRS).status_code == 400


def test_conversation_continues_in_the_process_that_stores_it(
    first: TestClient, stored: Json
) -> None:
    reference = {"type": "item_reference", "id": stored["output"][0]["id"]}
    for fields in ({"previous_response_id": stored["id"]}, {"input": [reference]}):
        answer = first.post(PATH, json=BODY | fields | {"more": "ä"}, headers=MINE)
        assert answer.status_code == 200, answer.text
        assert process_of(answer.json()["id"]) == 1
        assert answer.headers["X-Quire-Ignored-Fields"] == "more"
        assert answer.json()["usage"]["input_tokens"] > stored["usage"]["input_tokens"]


def test_stream_is_forwarded(first: TestClient, other: TestClient, stored: Json) -> None:
    body = BODY | {"previous_response_id": stored["id"], "stream": True, "background": True}
    events = events_in(first.post(PATH, json=body, headers=MINE).text)
    path = f"{PATH}/{events[-1]['response']['id']}"
    assert events_in(first.get(f"{path}?stream=true", headers=MINE).text) == events
    assert first.delete(path, headers=MINE).json()["deleted"]
    assert other.get(path, headers=MINE).status_code == 404


def test_forwarded_request_counts_once_against_the_limits(
    first: TestClient, other: TestClient, stored: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that received the request counts it."""
    counted: list[int] = []

    class Rates:
        def __init__(self, number: int) -> None:
            self.number = number

        def admit(self, key: int) -> None:
            counted.append(self.number)

    for number, client in enumerate((first, other)):
        context = cast(FastAPI, client.app).state.context
        monkeypatch.setattr(context, "rates", Rates(number))
    body = BODY | {"previous_response_id": stored["id"]}
    assert first.post(PATH, json=body, headers=MINE).status_code == 200
    assert counted == [0]
    assert other.post(PATH, json=BODY, headers=MINE).status_code == 200
    assert counted == [0, 1]


def test_stopped_process_is_a_503_and_unknown_one_a_404(
    first: TestClient, home: Path, stored: Json
) -> None:
    socket = home / "api-1.sock"
    moved = socket.rename(home / "away")
    try:
        answer = first.get(f"{PATH}/{stored['id']}", headers=MINE)
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["code"] == "process_gone"
    finally:
        moved.rename(socket)
    far = stored["id"].replace("_0001", "_0002")
    assert first.get(f"{PATH}/{far}", headers=MINE).status_code == 404


def test_single_process_has_no_peers(tmp_path: Path) -> None:
    assert Peers().listener() is None and Peers(0, 1, tmp_path).listener() is None
    assert not Peers().is_other(1) and not Peers(0, 2, tmp_path).is_other(0)


def test_socket_of_a_dead_process_is_replaced(tmp_path: Path) -> None:
    dead: Any = Peers(1, 2, tmp_path).listener()
    dead.close()
    again: Any = Peers(1, 2, tmp_path).listener()
    again.close()
