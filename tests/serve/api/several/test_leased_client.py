"""Requests to models that are loaded on demand: `serve/several/leased_client.py`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from quire.base.errors import EngineDead, RequestError
from quire.base.messages import Ready, Request
from quire.base.requests.outputs import RequestOutput
from quire.base.requests.sampling_params import SamplingParams
from quire.engine.client.async_client import AsyncClient
from quire.engine.client.fleet import CoreClient
from quire.serve.several.all_models import AllModels
from quire.serve.several.leased_client import LeasedClient
from quire.serve.several.messages import Deny, GiveBack, Grant, ModelState, RequestLease, States
from tests.support.serve.fake_supervisor import FakeKeeper, linked

READY = Ready(
    client_id=0, vocab_size=9, max_model_len=8, max_logprobs=0, max_num_seqs=1, settings={},
    memory="",
)  # fmt: skip


class Core:
    """A fake client of a core for a LeasedClient. sent: requests that reached the core."""

    def __init__(self) -> None:
        self.is_alive = False
        self.known: Ready | None = None
        self.sent: list[Request] = []
        self.loaded = asyncio.Event()

    @property
    def ready(self) -> Ready:
        if self.known is None:
            raise EngineDead("not yet.")
        return self.known

    def load(self) -> None:
        self.is_alive, self.known = True, READY
        self.loaded.set()

    async def wait_until_ready(self) -> None:
        await self.loaded.wait()

    def check(self, request: Request) -> None:
        if len(request.prompt_token_ids) > self.ready.max_model_len:
            raise RequestError("too long.")

    async def generate(self, request: Request, text: str | None) -> AsyncIterator[RequestOutput]:
        self.sent.append(request)
        for _ in range(2):
            yield cast(RequestOutput, object())

    async def metrics(self) -> str:
        return "some"

    async def cancel(self, request_ids: list[str] | None, tenant: str | None) -> list[str]:
        return []


Check = Callable[[LeasedClient, Core, FakeKeeper], Awaitable[None]]


def run(folder: Path, check: Check) -> None:
    async def main() -> None:
        async with asyncio.timeout(30.0), linked(folder) as (link, keeper):
            core = Core()
            client = LeasedClient(cast(CoreClient, core), link, "b")
            await check(client, core, keeper)

    asyncio.run(main())


def request(name: str = "r", **fields: Any) -> Request:
    return Request(name, [1, 2], SamplingParams(), 0, **fields)


async def outputs(client: LeasedClient, given: Request) -> int:
    return len([output async for output in client.generate(given)])


def test_request_leases_its_model_until_it_ends(tmp_path: Path) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        core.known = READY  # it was loaded before
        answering = asyncio.create_task(outputs(client, request()))
        assert await keeper.hear(1) == [RequestLease("b", 1)]
        assert not core.sent
        keeper.tell(Grant("b", 1))
        core.load()
        assert await answering == 2
        assert core.sent[0].received_s > 0  # the request's time includes the wait
        assert await keeper.hear(2) == [RequestLease("b", 1), GiveBack("b", 1)]

    run(tmp_path, check)


def test_limits_of_the_model_are_learnt_once(tmp_path: Path) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        with pytest.raises(EngineDead):
            client.ready  # noqa: B018
        learning = asyncio.create_task(client.wait_until_known())
        await keeper.hear(1)
        keeper.tell(Grant("b", 1))
        core.load()
        await learning
        core.is_alive = False
        await client.wait_until_known()
        assert client.ready is READY
        assert await keeper.hear(2) == [RequestLease("b", 1), GiveBack("b", 1)]

    run(tmp_path, check)


def test_invalid_request_loads_no_model(tmp_path: Path) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        core.known = READY
        with pytest.raises(RequestError, match="too long"):
            await outputs(client, Request("r", [1] * 9, SamplingParams(), 0))
        assert keeper.heard == []

    run(tmp_path, check)


def test_pieces_during_loading_join_the_prompt(tmp_path: Path) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        core.known = READY
        answering = asyncio.create_task(outputs(client, request(is_open=True)))
        await keeper.hear(1)
        client.append("r", [3])
        with pytest.raises(RequestError, match="too long"):
            client.append("r", [4] * 6)
        client.append("r", [4], is_last=True)
        with pytest.raises(RequestError, match="complete"):
            client.append("r", [5])
        keeper.tell(Grant("b", 1))
        core.load()
        await answering
        [sent] = core.sent
        assert sent.prompt_token_ids == [1, 2, 3, 4] and not sent.is_open

    run(tmp_path, check)


def test_core_death_before_it_is_ready_fails_the_request(tmp_path: Path) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        core.known = READY
        answering = asyncio.create_task(outputs(client, request()))
        await keeper.hear(1)
        keeper.tell(Grant("b", 1))
        keeper.tell_states(a="loaded", b="dead")
        with pytest.raises(EngineDead, match="model b does not answer"):
            await answering
        assert await keeper.hear(2) == [RequestLease("b", 1), GiveBack("b", 1)]
        assert not client.is_alive

    run(tmp_path, check)


def test_failed_load_fails_the_request_with_its_reason(tmp_path: Path) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        core.known = READY
        answering = asyncio.create_task(outputs(client, request()))
        await keeper.hear(1)
        keeper.tell(Deny("b", 1, "the file is gone."))
        with pytest.raises(EngineDead, match="the file is gone"):
            await answering

    run(tmp_path, check)


def test_waiting_requests_can_be_cancelled(tmp_path: Path) -> None:
    """They end with an empty output. Other requests and pins keep waiting."""

    async def last(client: LeasedClient, given: Request) -> RequestOutput:
        return [output async for output in client.generate(given)][-1]

    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        core.known = READY
        given = [
            request("cmpl-1-0", tenant="mine"),
            request("cmpl-1-1", tenant="mine"),
            request("cmpl-2", tenant="other"),
            request("pin", pin_s=1.0),
        ]
        answers = [asyncio.create_task(last(client, each)) for each in given]
        await keeper.hear(1)
        assert await client.cancel(["cmpl-1", "cmpl-2"], "mine") == ["cmpl-1-0", "cmpl-1-1"]
        for ended in await asyncio.gather(*answers[:2]):
            [output] = ended.outputs
            assert ended.finished and output.finish_reason == "abort" and output.text == ""
        assert await client.cancel(None, "mine") == []
        assert await client.cancel(None) == ["cmpl-2"]
        await answers[2]
        assert keeper.heard == [RequestLease("b", 1)]  # the pin still waits for the lease
        keeper.tell(Grant("b", 1))
        core.load()
        await answers[3]
        assert [each.request_id for each in core.sent] == ["pin"]
        assert await keeper.hear(2) == [RequestLease("b", 1), GiveBack("b", 1)]

    run(tmp_path, check)


def test_request_cancelled_as_its_model_loads_is_not_sent(tmp_path: Path) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        core.known = READY
        answering = asyncio.create_task(outputs(client, request()))
        await keeper.hear(1)
        wanted = client._link._requested.pop("b")
        core.load()
        client._link._grant("b", wanted)  # the request's task has not run since
        assert await client.cancel(None) == ["r"]
        assert await answering == 1 and core.sent == []
        assert await keeper.hear(2) == [RequestLease("b", 1), GiveBack("b", 1)]

    run(tmp_path, check)


def test_queries_do_not_load_a_model(tmp_path: Path) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        assert await client.metrics() == "" and await client.timeline("r") == ""
        assert await client.prefixes() == [] and await client.cancel(None) == []
        assert not await client.unpin("p")
        await client.reset_prefix_cache()
        with pytest.raises(EngineDead, match="model b is not loaded"):
            await client.live()
        core.load()
        assert await client.metrics() == "some"
        assert client.is_alive and keeper.heard == []

    run(tmp_path, check)


@pytest.mark.parametrize(
    ("state", "why", "expected"),
    [
        ("unloaded", "", True),  # the next request loads it
        ("loading", "", True),
        ("unloading", "", True),
        ("loading", "its process ended by itself.", False),
        ("unloaded", "the file is gone.", False),  # it failed, and will be retried
        ("loaded", "", False),  # without a connection to this process
        ("failed", "the file is gone.", False),
        ("dead", "its process ended by itself.", False),
    ],
)
def test_model_state_decides_liveness_without_a_connection(
    tmp_path: Path, state: str, why: str, expected: bool
) -> None:
    async def check(client: LeasedClient, core: Core, keeper: FakeKeeper) -> None:
        keeper.tell(States([ModelState("a", "loaded"), ModelState("b", state, why)]))
        await client._link.wait_for_state("b", (state,))
        while client._link.states["b"].why != why:
            await asyncio.sleep(0)
        assert client.is_alive == expected
        [reported] = AllModels({"b": cast(AsyncClient, client)}, client._link).states
        assert bool(reported.why) == (not expected), "the reason is reported"
        core.load()
        assert client.is_alive

    run(tmp_path, check)
