"""Requests about what another API process keeps: passed on with their key, whole and streamed."""

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
    """Process 1, which listens for the others; also asked directly."""
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
def kept(other: TestClient) -> Json:
    """A response of process 1."""
    found: Json = other.post(PATH, json=BODY, headers=MINE).json()
    assert process_of(found["id"]) == 1
    return found


def test_what_another_keeps_is_shown(first: TestClient, kept: Json) -> None:
    path = f"{PATH}/{kept['id']}"
    answer = first.get(path, headers=MINE | {"X-Request-Id": "mine"})
    assert (answer.status_code, answer.json()) == (200, kept)
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "mine"
    items = first.get(f"{path}/input_items?limit=1&order=asc", headers=MINE).json()
    assert items["data"][0]["content"][0]["text"] == "Hello"
    assert (
        first.get(f"{path}/input_items?limit=0", headers=MINE).json()["error"]["param"] == "limit"
    )
    assert first.post(f"{path}/cancel", headers=MINE, json={}).status_code == 400


def test_its_keys_hold(first: TestClient, kept: Json) -> None:
    path = f"{PATH}/{kept['id']}"
    assert first.get(path).status_code == 401
    assert first.post(f"{path}/cancel", json={"much": "x" * 9999}).status_code == 401
    assert first.get(path, headers=THEIRS).status_code == 404
    body = BODY | {"previous_response_id": kept["id"]}
    assert first.post(PATH, json=body, headers=THEIRS).status_code == 400


def test_a_conversation_goes_on_where_it_is_kept(first: TestClient, kept: Json) -> None:
    reference = {"type": "item_reference", "id": kept["output"][0]["id"]}
    for fields in ({"previous_response_id": kept["id"]}, {"input": [reference]}):
        answer = first.post(PATH, json=BODY | fields | {"more": "ä"}, headers=MINE)
        assert answer.status_code == 200, answer.text
        assert process_of(answer.json()["id"]) == 1
        assert answer.headers["X-Quire-Ignored-Fields"] == "more"
        assert answer.json()["usage"]["input_tokens"] > kept["usage"]["input_tokens"]


def test_a_stream_is_passed_on(first: TestClient, other: TestClient, kept: Json) -> None:
    body = BODY | {"previous_response_id": kept["id"], "stream": True, "background": True}
    events = events_in(first.post(PATH, json=body, headers=MINE).text)
    path = f"{PATH}/{events[-1]['response']['id']}"
    assert events_in(first.get(f"{path}?stream=true", headers=MINE).text) == events
    assert first.delete(path, headers=MINE).json()["deleted"]
    assert other.get(path, headers=MINE).status_code == 404


def test_what_is_passed_on_counts_once(
    first: TestClient, other: TestClient, kept: Json, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a key's limits: where it came in."""
    counted: list[int] = []

    class Rates:
        def __init__(self, number: int) -> None:
            self.number = number

        def admit(self, key: int) -> None:
            counted.append(self.number)

    for number, client in enumerate((first, other)):
        context = cast(FastAPI, client.app).state.context
        monkeypatch.setattr(context, "rates", Rates(number))
    body = BODY | {"previous_response_id": kept["id"]}
    assert first.post(PATH, json=body, headers=MINE).status_code == 200
    assert counted == [0]
    assert other.post(PATH, json=BODY, headers=MINE).status_code == 200
    assert counted == [0, 1]


def test_a_process_that_is_not_there(first: TestClient, home: Path, kept: Json) -> None:
    socket = home / "api-1.sock"
    moved = socket.rename(home / "away")
    try:
        answer = first.get(f"{PATH}/{kept['id']}", headers=MINE)
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["code"] == "process_gone"
    finally:
        moved.rename(socket)
    far = kept["id"].replace("_0001", "_0002")
    assert first.get(f"{PATH}/{far}", headers=MINE).status_code == 404


def test_a_process_that_is_alone_has_no_peers(tmp_path: Path) -> None:
    assert Peers().listener() is None and Peers(0, 1, tmp_path).listener() is None
    assert not Peers().is_other(1) and not Peers(0, 2, tmp_path).is_other(0)


def test_a_socket_of_one_that_has_died_is_replaced(tmp_path: Path) -> None:
    dead: Any = Peers(1, 2, tmp_path).listener()
    dead.close()
    again: Any = Peers(1, 2, tmp_path).listener()
    again.close()
