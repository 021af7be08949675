"""Hooks that raise, hang or block: the calling request continues, and so do the others."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire.serve.hooks.hook_calls import (
    MAX_HUNG,
    MAX_THREADS,
    Caller,
    CallExecutor,
    TooLong,
    Unavailable,
)

SOON_S = 0.05


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


class Waiting:
    """Methods that wait until `go` is set."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.num_inside = self.most_inside = 0
        self.lock = threading.Lock()

    def wait(self, thing: object) -> object:
        with self.lock:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
        self.go.wait()
        with self.lock:
            self.num_inside -= 1
        return thing

    async def block(self, thing: object) -> object:
        """Block the event loop, which an async method must not do."""
        return self.wait(thing)

    async def sleep(self, thing: object) -> None:
        await asyncio.Event().wait()


def returns(thing: object) -> object:
    return thing, threading.current_thread().name


async def returns_later(thing: object) -> object:
    await asyncio.sleep(0)
    return thing, threading.current_thread().name


def test_sync_and_async_methods_return_values() -> None:
    async def main() -> None:
        caller = Caller(CallExecutor(), 5.0)
        assert await caller.call(returns, 1) == ((1, "hook"), None)
        assert await caller.call(returns_later, 2) == ((2, "hooks"), None)

    run(main())


@pytest.mark.parametrize(
    "error", [ValueError("no"), StopIteration(), SystemExit(1), KeyboardInterrupt(),
              asyncio.CancelledError()],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize("is_async", [False, True])
def test_exceptions_of_methods_are_returned(error: BaseException, is_async: bool) -> None:
    def plain(_: object) -> None:
        raise error

    async def later(_: object) -> None:
        raise error

    async def main() -> None:
        caller = Caller(CallExecutor(), 5.0)
        for _ in range(2):  # thread and loop survive
            value, raised = await caller.call(later if is_async else plain, None)
            kinds = (type(error), RuntimeError)  # a coroutine turns StopIteration into it
            assert value is None and isinstance(raised, kinds)
        assert (await caller.call(returns, 1))[1] is None
        assert (await caller.call(returns_later, 1))[1] is None

    run(main())


@pytest.mark.parametrize("name", ["wait", "block"])
def test_hanging_call_is_abandoned_and_others_continue(name: str) -> None:
    async def main() -> None:
        executor, waiting = CallExecutor(), Waiting()
        hanging, other = Caller(executor, SOON_S), Caller(executor, 30.0)
        value, error = await hanging.call(getattr(waiting, name), 1)
        assert value is None and isinstance(error, TooLong)
        assert hanging.num_hung == 1
        assert (await other.call(returns, 2))[0][0] == 2
        blocked = executor._async
        if blocked is not None:
            await until(lambda: executor._async is not blocked)
        for method in (returns, returns_later):
            assert (await other.call(method, 2))[0][0] == 2
        assert waiting.num_inside == 1
        waiting.go.set()
        await until(lambda: hanging.num_hung == 0)
        assert (await hanging.call(returns, 3))[0][0] == 3
        assert (await hanging.call(returns_later, 3))[0][0] == 3

    run(main())


def test_slow_async_call_is_cancelled() -> None:
    async def main() -> None:
        caller = Caller(CallExecutor(), SOON_S)
        _, error = await caller.call(Waiting().sleep, None)
        assert isinstance(error, TooLong)
        await until(lambda: caller.num_hung == 0)

    run(main())


def test_too_many_hanging_calls_fail_only_their_caller() -> None:
    async def main() -> None:
        executor, waiting = CallExecutor(), Waiting()
        hanging, other = Caller(executor, SOON_S), Caller(executor, 30.0)
        calls = [hanging.call(waiting.wait, i) for i in range(MAX_HUNG)]
        assert all(isinstance(error, TooLong) for _, error in await asyncio.gather(*calls))
        for method in (returns, returns_later):
            _, error = await hanging.call(method, 0)
            assert isinstance(error, Unavailable)
            assert (await other.call(method, 1))[1] is None
        waiting.go.set()
        await until(lambda: hanging.num_hung == 0)
        assert (await hanging.call(returns, 1))[1] is None

    run(main())


def test_threads_stay_bounded_when_callers_are_cancelled() -> None:
    async def main() -> None:
        executor, waiting = CallExecutor(), Waiting()
        caller = Caller(executor, 30.0)
        tasks = [asyncio.create_task(caller.call(waiting.wait, i)) for i in range(MAX_THREADS)]
        await until(lambda: waiting.num_inside == MAX_THREADS)
        for task in tasks:
            task.cancel()
        late = [asyncio.create_task(caller.call(waiting.wait, i)) for i in range(MAX_THREADS + 3)]
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        assert waiting.most_inside == MAX_THREADS
        waiting.go.set()
        assert [value for value, _ in await asyncio.gather(*late)] == list(range(MAX_THREADS + 3))
        assert waiting.most_inside == MAX_THREADS
        assert len(executor.threads._idle) <= MAX_THREADS

    run(main())


def test_idle_threads_end_when_the_executor_closes() -> None:
    async def main() -> set[threading.Thread]:
        before, executor = set(threading.enumerate()), CallExecutor()
        caller = Caller(executor, 30.0)
        await caller.call(returns, 1)
        await caller.call(returns_later, 1)
        mine = set(threading.enumerate()) - before
        assert len(mine) == 2
        executor.close()
        await until(lambda: not any(thread.is_alive() for thread in mine))
        return mine

    run(main())
