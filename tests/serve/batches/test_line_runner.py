"""Lines of a batch through the app: their outputs, their retries, and how many are open."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from quire.base.errors import EngineDead
from quire.serve.app import create_app
from quire.serve.batches import line_runner
from quire.serve.batches.app_caller import BATCH_URLS, AppCaller, Reply
from quire.serve.batches.journal import Journal
from quire.serve.batches.line_runner import LineOptions, LineRunner, Slots
from quire.serve.native.document import ORDERS
from tests.serve.api.conftest import MakeContext
from tests.support.serve.batch_files import index_of, read, request, write


class Scripted:
    """Stands in for an app: replies once `go` is set, and counts open requests."""

    urls = frozenset({"/v1/completions"})

    def __init__(self, *replies: Reply | BaseException) -> None:
        self.replies = list(replies)
        self.num_open = self.most_open = 0
        self.bodies: list[Any] = []
        self.go = asyncio.Event()

    async def post(self, path: str, body: bytes) -> Reply:
        self.bodies.append(json.loads(body))
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.go.wait()
        finally:
            self.num_open -= 1
        reply = self.replies.pop(0) if self.replies else Reply(200, "req-1", b'{"a":\n1}')
        if isinstance(reply, BaseException):
            raise reply
        return reply


def make_runner(tmp_path: Path, lines: list[Any], **options: Any) -> LineRunner:
    index = index_of(write(tmp_path / "in", lines))
    return LineRunner(index, Journal(tmp_path / "out"), LineOptions(**options))


def test_answers_equal_those_of_the_server(tmp_path: Path, make_context: MakeContext) -> None:
    lines = [request(str(i), f"Fox {i % 2}") for i in range(5)]
    lines[3]["body"]["max_tokens"] = -1
    lines[2]["body"]["mirostat"] = 2  # a field of another engine
    app = create_app(make_context())
    with TestClient(app) as client:
        wanted = [client.post(line["url"], json=line["body"]) for line in lines]
    runner = make_runner(tmp_path, [*lines, "no json"])
    asyncio.run(runner.run(AppCaller(create_app(make_context())), Slots(3)))
    assert runner.is_complete and (runner.tally.num_completed, runner.tally.num_failed) == (3, 3)
    found = {line["custom_id"]: line for line in read(tmp_path / "out")}
    assert found[None]["error"]["code"] == "invalid_json_line" and found[None]["response"] is None
    for number, answer in enumerate(wanted):
        line = found[str(number)]
        assert line["error"] is None and line["id"].startswith("batch_req_")
        response = line["response"]
        assert response["status_code"] == answer.status_code == (400 if number in (2, 3) else 200)
        assert response["request_id"].startswith("req-")
        if number in (2, 3):
            assert response["body"] == answer.json()
        else:
            assert response["body"]["choices"] == answer.json()["choices"]


def test_batch_urls_take_json_and_exclude_operator_routes(make_context: MakeContext) -> None:
    client = TestClient(create_app(make_context()))
    refused = {path: client.post(path, json=[]) for path in BATCH_URLS}
    assert {path for path, reply in refused.items() if reply.status_code != 400} == set()
    for_operators = (*ORDERS, "/v1/files", "/v1/batches", "/v1/prefixes", "/v1/requests")
    assert not [path for path in BATCH_URLS if path.startswith(for_operators)]


def test_batch_requests_carry_an_api_key(tmp_path: Path, make_context: MakeContext) -> None:
    app: FastAPI = create_app(make_context(api_key=("secret",)))
    body = json.dumps({"prompt": "Hello"}).encode()

    async def ask(key: str | None) -> int:
        return (await AppCaller(app, key).post("/tokenize", body)).status

    assert [asyncio.run(ask(key)) for key in ("secret", "other", None)] == [200, 401, 401]


def test_as_many_lines_are_open_as_there_are_slots(tmp_path: Path) -> None:
    lines = [request(str(i)) for i in range(9)]
    lines[4]["body"]["n"] = 3
    runner = make_runner(tmp_path, lines, priority=77)

    async def run() -> Scripted:
        app = Scripted()
        work = asyncio.create_task(runner.run(app, Slots(4)))  # type: ignore[arg-type]
        while app.num_open < 4:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert app.num_open == runner.num_open == 4
        app.go.set()
        await work
        return app

    app = asyncio.run(run())
    assert app.most_open == 4 and len(app.bodies) == 9
    assert {body["priority"] for body in app.bodies} == {77}
    assert read(tmp_path / "out")[0]["response"]["body"] == {"a": 1}


@pytest.mark.parametrize(("status", "code"), [(503, "engine_busy"), (429, "rate_limit_exceeded")])
def test_lines_are_retried_on_a_busy_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, code: str
) -> None:
    monkeypatch.setattr(line_runner, "FIRST_PAUSE_S", 0.001)
    busy = Reply(status, "r", b'{"error": {"code": "%s"}}' % code.encode())
    runner = make_runner(tmp_path, [request("a"), request("b")])

    async def run() -> Scripted:
        app = Scripted(busy, busy, busy)
        app.go.set()
        await runner.run(app, Slots(2))  # type: ignore[arg-type]
        return app

    assert len(asyncio.run(run()).bodies) == 5
    assert [line["response"]["status_code"] for line in read(tmp_path / "out")] == [200, 200]


def test_replies_of_a_dead_engine_are_not_written(tmp_path: Path) -> None:
    dead = Reply(503, "r", b'{"error": {"code": "engine_dead"}}')
    runner = make_runner(tmp_path, [request(str(i)) for i in range(5)], ends_with_engine=True)

    async def run() -> None:
        app = Scripted(Reply(200, "r", b"{}"), dead, dead)
        app.go.set()
        await runner.run(app, Slots(1))  # type: ignore[arg-type]

    with pytest.raises(EngineDead):
        asyncio.run(run())
    assert len(read(tmp_path / "out")) == runner.tally.num_done == 1


def test_stop_finishes_open_lines(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, [request(str(i)) for i in range(9)])

    async def run() -> None:
        app, stopped = Scripted(), asyncio.Event()
        work = asyncio.create_task(runner.run(app, Slots(2), stopped.is_set))  # type: ignore[arg-type]
        while app.num_open < 2:
            await asyncio.sleep(0)
        stopped.set()
        app.go.set()
        await work

    asyncio.run(run())
    assert runner.tally.num_done == 2 and not runner.is_complete
    again = make_runner_again(tmp_path)
    asyncio.run(again.fail_rest("batch_expired", "too late"))
    assert again.is_complete
    found = read(tmp_path / "out")
    assert len({line["custom_id"] for line in found}) == len(found) == 9
    errors = [line["error"] for line in found[2:]]
    assert errors == [{"code": "batch_expired", "message": "too late"}] * 7


def make_runner_again(tmp_path: Path) -> LineRunner:
    """Open the journal like a second process; the first one's journal is closed with it."""
    (tmp_path / "out").rename(tmp_path / "old")
    (tmp_path / "out").write_bytes((tmp_path / "old").read_bytes())
    return LineRunner(index_of(tmp_path / "in"), Journal(tmp_path / "out"))


def test_cancelling_closes_open_lines_and_writes_none(tmp_path: Path) -> None:
    runner = make_runner(tmp_path, [request(str(i)) for i in range(9)])

    async def run() -> Scripted:
        app = Scripted()
        work = asyncio.create_task(runner.run(app, Slots(2)))  # type: ignore[arg-type]
        while app.num_open < 2:
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return app

    assert asyncio.run(run()).num_open == 0
    assert read(tmp_path / "out") == []


def test_slots_are_granted_in_order() -> None:
    async def run() -> list[str]:
        slots, got = Slots(4), list[str]()

        async def take(name: str, number: int) -> None:
            taken = await slots.take(number)
            got.append(f"{name}{taken}")

        await take("a", 3)
        tasks = [asyncio.create_task(take(*each)) for each in (("b", 2), ("c", 1), ("d", 9))]
        await asyncio.sleep(0)
        assert got == ["a3"]  # c would fit, but b waits ahead of it
        slots.give(3)
        await asyncio.sleep(0)
        assert got == ["a3", "b2", "c1"]
        slots.give(3)
        await asyncio.sleep(0)
        assert got[-1] == "d4"
        slots.give(4)
        await asyncio.gather(*tasks)
        waiting = asyncio.create_task(take("e", 4))
        await waiting
        left = asyncio.create_task(take("f", 1))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        slots.give(4)
        await take("g", 4)
        return got

    assert asyncio.run(run())[-2:] == ["e4", "g4"]
