"""Model leases of an API process: `serve/several/link.py`."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from quire.base.errors import EngineBusy, EngineDead
from quire.serve.several import link as link_module
from quire.serve.several.link import ModelLink
from quire.serve.several.messages import Deny, GiveBack, Grant, RequestLease, UnloadModel
from tests.support.serve.fake_supervisor import FakeKeeper, linked

Check = Callable[[ModelLink, FakeKeeper], Awaitable[None]]


def run(folder: Path, check: Check, wait_s: float = 10.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(30.0), linked(folder, wait_s) as (link, keeper):
            await check(link, keeper)

    asyncio.run(main())


async def hold(link: ModelLink, model: str = "a") -> AsyncExitStack:
    stack = AsyncExitStack()
    await stack.enter_async_context(link.lease(model))
    return stack


async def granted(link: ModelLink, keeper: FakeKeeper, number: int = 1) -> AsyncExitStack:
    """Return a lease that the keeper has granted."""
    waiting = asyncio.create_task(hold(link))
    num_heard = len(keeper.heard)
    await keeper.hear(num_heard + 1)
    keeper.tell(Grant("a", number))
    return await waiting


def test_requests_share_a_lease_until_the_last_one_ends(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        waiting = [asyncio.create_task(hold(link)) for _ in range(3)]
        assert await keeper.hear(1) == [RequestLease("a", 1)]
        keeper.tell(Grant("a", 1))
        stacks = [await each for each in waiting]
        stacks.append(await hold(link))  # requests under the lease ask for no new one
        for stack in stacks:
            assert keeper.heard == [RequestLease("a", 1)]
            await stack.aclose()
        assert await keeper.hear(2) == [RequestLease("a", 1), GiveBack("a", 1)]

    run(tmp_path, check)


def test_request_after_an_unload_waits_for_a_new_lease(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        first = await granted(link, keeper)
        keeper.tell(UnloadModel("a"))
        keeper.tell_states(a="loaded", b="loading")
        await link.wait_for_state("b", ["loading"])
        second = asyncio.create_task(hold(link))
        assert await keeper.hear(2) == [RequestLease("a", 1), RequestLease("a", 2)]
        await first.aclose()
        assert (await keeper.hear(3))[2] == GiveBack("a", 1)
        assert not second.done()
        keeper.tell(Grant("a", 2))
        await (await second).aclose()
        assert (await keeper.hear(4))[3] == GiveBack("a", 2)

    run(tmp_path, check)


def test_new_lease_may_be_granted_before_the_old_one_is_back(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        first = await granted(link, keeper)
        keeper.tell(UnloadModel("a"))
        keeper.tell_states(a="loaded", b="failed")
        await link.wait_for_state("b", ["failed"])
        second = asyncio.create_task(hold(link))
        await keeper.hear(2)
        keeper.tell(Grant("a", 2))
        other = await second
        await first.aclose()
        third = await hold(link)  # under the second lease, which is still open
        await other.aclose()
        assert (await keeper.hear(3))[2:] == [GiveBack("a", 1)]
        await third.aclose()
        assert (await keeper.hear(4))[3] == GiveBack("a", 2)

    run(tmp_path, check)


def test_lease_without_waiting_requests_is_given_back(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        waiting = [asyncio.create_task(hold(link)) for _ in range(2)]
        await keeper.hear(1)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        assert keeper.heard == [RequestLease("a", 1)]
        waiting[1].cancel()
        assert await keeper.hear(2) == [RequestLease("a", 1), GiveBack("a", 1)]
        keeper.tell(Grant("a", 1))  # sent before the return of the lease arrived
        await (await granted(link, keeper, number=2)).aclose()
        assert (await keeper.hear(4))[2:] == [RequestLease("a", 2), GiveBack("a", 2)]

    run(tmp_path, check)


def test_request_cancelled_at_the_grant_gives_the_lease_back(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        waiting = asyncio.create_task(hold(link))
        await keeper.hear(1)
        link._take(Grant("a", 1))  # before the task runs again, it is cancelled
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await keeper.hear(2) == [RequestLease("a", 1), GiveBack("a", 1)]

    run(tmp_path, check)


def test_denial_reports_its_reason(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        waiting = [asyncio.create_task(hold(link)) for _ in range(2)]
        await keeper.hear(1)
        keeper.tell(Deny("a", 1, "no room."))
        for each in waiting:
            with pytest.raises(EngineDead, match="model a is not available: no room."):
                await each

    run(tmp_path, check)


def test_lease_wait_times_out_and_names_the_loaded_model(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        with pytest.raises(EngineBusy, match="model b was not loaded within 0.05 s .*used by a"):
            await hold(link, "b")
        assert await keeper.hear(2) == [RequestLease("b", 1), GiveBack("b", 1)]

    run(tmp_path, check, wait_s=0.05)


def test_shorter_lease_timeout_takes_precedence(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        with pytest.raises(EngineBusy, match=r"within 0.02 s"):
            async with link.lease("b", 0.02):
                pass

    run(tmp_path, check)


def test_number_of_waiting_requests_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_WAITING", 2)

    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        waiting = [asyncio.create_task(hold(link)) for _ in range(2)]
        await keeper.hear(1)
        with pytest.raises(EngineBusy, match="2 requests are waiting for model a already"):
            await hold(link)
        keeper.tell(Grant("a", 1))
        for each in waiting:
            await (await each).aclose()

    run(tmp_path, check)


def test_supervisor_exit_fails_waiting_and_new_requests(tmp_path: Path) -> None:
    async def check(link: ModelLink, keeper: FakeKeeper) -> None:
        waiting = asyncio.create_task(hold(link))
        await keeper.hear(1)
        assert keeper.writer is not None
        keeper.writer.close()
        with pytest.raises(EngineDead, match="the server is ending"):
            await waiting
        with pytest.raises(EngineDead, match="the server is ending"):
            await hold(link)

    run(tmp_path, check)
