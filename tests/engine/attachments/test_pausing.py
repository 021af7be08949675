"""Pauses of a core that clients reach by its socket: what runs, what waits, and what continues.

Covers `engine/wire/orders.py`.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.base.clock import MonotonicClock
from quire.base.errors import RequestError
from quire.base.requests.outputs import RequestOutput, WeightsSpan
from quire.base.settings.config import config_from_flat
from quire.engine.client.async_client import pause
from quire.engine.client.remote import RemoteClient
from quire.engine.start.build import build_core
from quire.engine.wire.orders import announce_changes, order_handlers
from quire.models.checkpoint.source import resolve_model
from tests.engine.client.test_remote import PROMPT, SETTINGS, Served, request
from tests.support.cases import slow_but
from tests.support.models.reference_checkpoints import changed, checkpoint

LONG = 60


@pytest.fixture(params=slow_but((1, 2), 1), ids=["depth 1", "depth 2"])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    settings = SETTINGS | {"pipeline_depth": request.param}
    config = config_from_flat(model=str(checkpoint("llama")), **settings)
    built = build_core(config, resolve_model(config.model.model), MonotonicClock())
    handlers = order_handlers(built.updates, built.pausing, built.sleeping)
    server = Served(tmp_path, built.core, handlers=handlers)
    announce_changes(built.updates, server.server)
    yield server
    server.stop()
    server.core.close()


class Reader:
    """Reads one request to its end in a task. tokens: the tokens that have arrived."""

    def __init__(self, client: RemoteClient, name: str, max_tokens: int = LONG) -> None:
        self.tokens: list[int] = []
        self.last: RequestOutput | None = None
        self.first = asyncio.Event()
        self.task = asyncio.create_task(self._read(client, name, max_tokens))

    async def _read(self, client: RemoteClient, name: str, max_tokens: int) -> None:
        async for output in client.generate(request(name, PROMPT, max_tokens)):
            self.tokens += output.outputs[0].token_ids
            self.last = output
            self.first.set()

    @property
    def reason(self) -> str | None:
        assert self.last is not None
        return self.last.outputs[0].finish_reason


async def wanted(client: RemoteClient) -> list[int]:
    reader = Reader(client, "wanted")
    await reader.task
    return reader.tokens


def test_keep_freezes_running_requests_and_queues_later_ones(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        whole = await wanted(client)
        running = Reader(client, "running")
        await running.first.wait()
        await pause(client, "keep", clear_cache=False)
        assert await client.pause(None)
        later = Reader(client, "later")
        num = len(running.tokens)
        # The replies show that the core's loop has run since the pause.
        await client.metrics()
        await client.metrics()
        assert len(running.tokens) == num < LONG and not later.tokens
        assert served.core.num_in_flight == 0
        await client.pause(False)
        assert not await client.pause(None)
        await asyncio.gather(running.task, later.task)
        assert running.tokens == later.tokens == whole
        await client.close()

    asyncio.run(run())


def test_wait_finishes_running_requests_and_queues_later_ones(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        whole = await wanted(client)
        running = Reader(client, "running")
        await running.first.wait()
        pausing = asyncio.create_task(pause(client, "wait", clear_cache=True))
        await client.metrics()
        later = Reader(client, "later")
        await pausing
        await running.task
        assert running.tokens == whole and running.reason == "length"
        assert await client.pause(None) and not later.tokens
        await client.pause(False)
        await later.task
        assert later.tokens == whole
        await client.close()

    asyncio.run(run())


def test_abort_ends_requests_with_their_partial_output(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        whole = await wanted(client)
        running = Reader(client, "running")
        await running.first.wait()
        await pause(client, "abort", clear_cache=True)
        await running.task
        num = len(running.tokens)
        assert running.reason == "abort" and running.tokens == whole[:num]
        await client.pause(False)
        assert await wanted(client) == whole
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(("mode", "reason"), [("wait", "length"), ("abort", "abort")])
def test_frozen_engine_pauses_without_waiting(served: Served, mode: str, reason: str) -> None:
    """Its requests cannot finish, so a wait for them would never end."""

    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        running = Reader(client, "running")
        await running.first.wait()
        await pause(client, "keep", clear_cache=False)
        async with asyncio.timeout(30):
            await pause(client, mode, clear_cache=False)
        assert await client.pause(None)
        await client.pause(False)
        await running.task
        assert running.reason == reason
        await client.close()

    asyncio.run(run())


def test_an_unknown_mode_changes_nothing(served: Served) -> None:
    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        with pytest.raises(RequestError, match="mode='stop' is unknown; use abort, wait, keep"):
            await pause(client, "stop", clear_cache=True)
        assert not await client.pause(None)
        await client.close()

    asyncio.run(run())


def test_all_clients_report_new_weights(served: Served) -> None:
    """During a paused request, and for clients that connect later."""

    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        other = await RemoteClient.connect(served.path, None)
        whole = await wanted(client)
        running = Reader(client, "running")
        await running.first.wait()
        await client.pause(True)
        num = len(running.tokens)
        assert await other.update_weights(str(changed("llama", 1)), "new") == "new"
        with pytest.raises(RequestError, match="does not exist"):
            await other.update_weights("/nowhere")
        await client.pause(False)
        await running.task
        assert running.last is not None
        assert running.last.outputs[0].weights_versions == (WeightsSpan(num, "new"),)
        assert running.tokens[:num] == whole[:num] and running.tokens != whole
        late = await RemoteClient.connect(served.path, None)
        reader = Reader(late, "late")
        await reader.task
        assert reader.last is not None
        assert reader.last.outputs[0].weights_versions == (WeightsSpan(0, "new"),)
        for each in (client, other, late):
            await each.close()

    asyncio.run(run())


def test_paused_engine_closes(served: Served) -> None:
    """Its last plans, which save the cache, run despite the pause."""

    async def run() -> None:
        client = await RemoteClient.connect(served.path, None)
        await client.pause(True)
        await client.close()

    asyncio.run(run())
    served.stop()
    served.core.close()
