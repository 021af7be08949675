"""GET /v1/engine/live: a snapshot and differences that add up, permissions, and the end."""

import asyncio
import json
from collections.abc import AsyncGenerator
from itertools import count
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from quire.base.live import LiveFrame
from quire.engine.observability import live as live_frames
from quire.engine.observability.live import LiveFrames
from quire.serve.app import create_app
from quire.serve.context import ApiContext
from quire.serve.http.sse import ALIVE, DONE
from quire.serve.native import live
from quire.serve.native.live import live_events
from quire.serve.native.live_events import difference, snapshot
from tests.serve.api.conftest import MakeContext
from tests.support.scheduler.watched_scheduler import blocks_of, random_run
from tests.support.serve.fake_client import FakeClient, live_over_the_wire

KEYS = ("one", "boss")


class Viewer:
    """A client of the events, which stores the snapshot and applies the differences."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = {}
        self.num_events = 0
        self.counts: dict[str, int] = {}

    def take(self, event: dict[str, Any]) -> None:
        event = msgspec.json.decode(msgspec.json.encode(event))
        for group in event.pop("groups", []) if event["type"] == "difference" else []:
            mine = self.known["groups"][group["group"]]
            for name in ("owners", "sharers", "states"):
                for block, value in zip(group["blocks"], group[name], strict=True):
                    mine[name][block] = value
        self.num_events += len(event.get("events", []))
        for kind, num in event.pop("counts", {}).items():
            self.counts[kind] = self.counts.get(kind, 0) + num
        self.known |= event

    def blocks(self, g: int) -> list[tuple[int, int, int]]:
        group = self.known["groups"][g]
        return list(zip(group["owners"], group["sharers"], group["states"], strict=True))


@pytest.mark.parametrize("every", [1, 7])
def test_snapshot_plus_differences_equal_the_engine_state(every: int) -> None:
    """Also for a client that misses frames: a difference starts from the last frame sent."""
    viewer, frames, reported = Viewer(), None, None
    for i, bench in enumerate(random_run(21, 150, preemption_mode="swap")):
        frames = frames or LiveFrames(bench.core, bench.clock)
        bench.clock.advance(live_frames.FRAME_S)
        frame = live_over_the_wire(frames.frame())
        if i % every:
            continue
        if reported is None:
            viewer.take(snapshot(frame))
        else:
            viewer.take({"type": "difference"} | difference(reported, frame))
        reported = frame
        for g in range(2):
            assert viewer.blocks(g) == blocks_of(bench, g)
        assert [row["id"] for row in viewer.known["running"]] == [
            s.request.request_id for s in bench.scheduler.rows.sequences()
        ]
        assert len(viewer.known["waiting"]) == len(frame.state.waiting)
        pinned = [pin.request.request_id for pin in bench.scheduler.pinned.ready]
        assert [row["id"] for row in viewer.known["pinned"]] == pinned
        host = bench.kv.host_pools
        assert viewer.known["host"]["num_swapped"] == sum(pool.num_used for pool in host)
    assert reported is not None
    moves = sum(len(m.source) for plan in bench.plans[1:] for m in plan.moves)
    kinds = ("copy", "swap_out", "load")
    assert sum(viewer.counts.get(kind, 0) for kind in kinds) <= moves
    assert viewer.num_events > 0


def test_unchanged_state_gives_an_empty_difference() -> None:
    *_, bench = random_run(2, 20)
    frames = LiveFrames(bench.core, bench.clock)
    first = frames.frame()
    bench.clock.advance(1.0)
    assert difference(first, frames.frame()) == {}


def events_of(text: str) -> list[Any]:
    data = [line.removeprefix("data: ") for line in text.split("\n") if line]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def read_until(context: ApiContext, enough: Any) -> list[Any]:
    """Return the events of a stream, read in this thread until `enough` accepts them."""

    async def run() -> list[Any]:
        found: list[Any] = []
        async for data in live_events(context, 0):
            found += events_of(data.decode())
            if enough(found):
                context.draining = True
        return found

    return asyncio.run(run())


def test_stream_starts_with_a_snapshot_and_ends_with_the_server(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.001)
    monkeypatch.setattr(live, "QUIET_S", 0.0)
    monkeypatch.setattr(live_frames, "FRAME_S", 0.0)
    events = read_until(make_context(), lambda found: len(found) == 3)
    assert [event["type"] for event in events[:3]] == ["snapshot", "difference", "difference"]
    assert events[-1] == "[DONE]"
    assert events[0]["num_cores"] == 1 and events[0]["states"][0] == "free"


def test_repeated_frames_are_sent_once(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A core returns the same frame again if a new one is not due, or if the core is busy."""
    monkeypatch.setattr(live, "PERIOD_S", 0.0)
    context = make_context()
    original, requested = context.client.live, []

    async def counted(core: int = 0) -> LiveFrame:
        requested.append(core)
        context.draining = len(requested) == 20
        return await original(core)

    monkeypatch.setattr(context.client, "live", counted)
    monkeypatch.setattr(live_frames, "FRAME_S", 1000.0)
    events = read_until(context, lambda found: False)
    assert [event if event == "[DONE]" else event["type"] for event in events] == [
        "snapshot",
        "[DONE]",
    ]
    assert len(requested) == 20


def test_each_key_sees_only_its_own_requests() -> None:
    """Requests of other tenants appear only as blocks and counts, without ids."""
    *_, bench = random_run(21, 20, preemption_mode="swap", max_num_seqs=3)
    for i in range(6):
        owner = "mine" if i % 2 else "theirs"
        bench.add(f"{owner} {i}", list(range(9 + i)), 20, tenant=f"key {i % 2}")
    bench.step()
    frames = LiveFrames(bench.core, bench.clock)
    first = live_over_the_wire(frames.frame())
    bench.clock.advance(1.0)
    bench.step()
    second = live_over_the_wire(frames.frame())
    events = [snapshot(first, "key 1"), difference(first, second, "key 1")]
    text = msgspec.json.encode(events).decode()
    assert "mine 1" in text
    others = [f"theirs {i}" for i in (0, 2, 4)] + [f"r{i}" for i in range(20)] + ["key 0", "key 1"]
    assert not [name for name in others if f'"{name}"' in text]
    viewer = Viewer()
    viewer.take(events[0])
    viewer.take({"type": "difference"} | events[1])
    assert viewer.blocks(0) == blocks_of(bench, 0)
    reported = viewer.known["running"] + viewer.known["waiting"]
    assert {row["id"] for row in reported} == {"mine 1", "mine 3", "mine 5"}
    assert viewer.known["num_running"] + viewer.known["num_waiting"] > len(reported)


@pytest.mark.parametrize(("key", "tenant"), [("one", "key 1"), ("boss", None)])
def test_keys_see_their_tenant_and_admin_keys_see_all(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch, key: str, tenant: str | None
) -> None:
    context = make_context(api_key=KEYS, admin_api_key=KEYS[1:])
    context.draining = True  # the stream ends immediately
    requested: list[str | None] = []

    def watched(api: ApiContext, core: int, owner: str | None) -> AsyncGenerator[bytes, None]:
        requested.append(owner)
        return live_events(api, core, owner)

    monkeypatch.setattr(live, "live_events", watched)
    with TestClient(create_app(context)) as api:
        path = "/v1/engine/live"
        assert api.get(path).status_code == 401
        found = api.get(path, headers={"Authorization": f"Bearer {key}"})
        assert (found.status_code, events_of(found.text)) == (200, ["[DONE]"])
    assert requested == [tenant]


def test_unknown_core_is_refused(api: TestClient) -> None:
    refused = api.get("/v1/engine/live?core=1")
    assert refused.status_code == 400 and "data_parallel_rank=1" in refused.text
    assert api.get("/v1/engine/live?core=-1").status_code == 400


def test_dead_engine_gives_503(api: TestClient, api_context: ApiContext) -> None:
    client = api_context.client
    assert isinstance(client, FakeClient)
    client.kill()
    refused = api.get("/v1/engine/live")
    assert refused.status_code == 503
    client.revive()


def test_keep_alive_comments_are_sent_between_frames(
    make_context: MakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames may be 10 s apart, but the page reports a dead engine after 5 s without a byte."""
    assert live.ALIVE_S <= 2.0
    monkeypatch.setattr(live, "ALIVE_S", 0.01)
    monkeypatch.setattr(live, "PERIOD_S", 0.0)
    context = make_context(sse_keep_alive_interval=0)
    original, sent, num_requested = context.client.live, list[bytes](), count()

    async def run() -> None:
        has_comment = asyncio.Event()

        async def late(core: int = 0) -> LiveFrame:
            if next(num_requested) > 0:
                await has_comment.wait()
                context.draining = True
            return await original(core)

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if sent[-1] == ALIVE:
                has_comment.set()

        requested = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive() -> Any:
            return next(requested, None) or await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(context.client, "live", late)
        scope = {
            "type": "http", "http_version": "1.1", "method": "GET", "path": "/v1/engine/live",
            "raw_path": b"/v1/engine/live", "query_string": b"", "scheme": "http",
            "headers": [(b"host", b"testserver")], "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
        }  # fmt: skip
        await asyncio.wait_for(create_app(context)(scope, receive, send), 20)

    asyncio.run(run())
    assert ALIVE in sent and b"".join(sent).endswith(DONE)
