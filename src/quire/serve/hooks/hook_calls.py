"""Calls of hooks: foreign code that may raise or hang, called from an event loop that must not.

Plain methods run on threads, and async methods on an event loop of their own, so they cannot block
the loop that awaits them. A call that exceeds its time is abandoned. Its thread no longer counts as
busy, and a blocked event loop is replaced (other async calls on it may miss their deadline, too).
The number of abandoned calls is bounded for each hook. At the bound, requests that need the hook
fail at once.
"""

import asyncio
import inspect
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

MAX_THREADS = 32  # busy threads; other calls wait
MAX_HUNG = 8  # calls of one hook that missed their deadline and still run
STUCK_S = 1.0  # time without a reaction after which an event loop counts as blocked

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]  # the value that a call returned, or its error
OutcomeCallback = Callable[[Any, BaseException | None], None]


class TooLong(Exception):
    """The call missed its deadline."""


class Unavailable(Exception):
    """The hook has reached its maximum number of hanging calls."""


class Caller:
    """Caller of one hook's methods. num_hung: calls that missed their deadline and still run."""

    def __init__(self, executor: "CallExecutor", timeout_s: float) -> None:
        self.num_hung = 0
        self._executor = executor
        self._timeout_s = timeout_s

    async def call(self, method: Callable[[T], Any], thing: T) -> Outcome:
        """Return the value that the method returns, or its error. The error may also be TooLong, or
        Unavailable if the method was not called. Raises only CancelledError, for its awaiter."""
        executor = self._executor
        if inspect.iscoroutinefunction(method):
            if self.num_hung >= MAX_HUNG:
                return None, Unavailable()
            call = _Call(self, self._timeout_s, _nothing)
            executor.begin_async(call, method(thing))
            return await call.outcome
        await executor.slots.acquire()
        if self.num_hung >= MAX_HUNG:
            executor.slots.release()
            return None, Unavailable()
        call = _Call(self, self._timeout_s, executor.slots.release)
        executor.threads.begin(lambda: method(thing), call.end_from_anywhere)
        return await call.outcome


class _Call:
    """One call, on the event loop that awaits it. It ends in time or at its deadline. If the
    awaiting task leaves, the call still counts until then.

    free: releases the call's slot. on_expiry: extra action at the deadline.
    """

    def __init__(self, caller: Caller, timeout_s: float, free: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Outcome] = self.loop.create_future()
        self.on_expiry: Callable[[], object] = _nothing
        self._caller = caller
        self._free = free
        self._is_expired = False
        self._timer = self.loop.call_later(timeout_s, self._expire)

    def end_from_anywhere(self, value: Any, error: BaseException | None) -> None:
        """Record the outcome of the call; any thread may call this."""
        with suppress(RuntimeError):  # the loop was closed, so no task awaits the outcome
            self.loop.call_soon_threadsafe(self._end, value, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        if self._is_expired:
            self._caller.num_hung -= 1
            return
        self._timer.cancel()
        self._free()
        self._set_outcome(value, error)

    def _expire(self) -> None:
        self._is_expired = True
        self._caller.num_hung += 1
        self._free()
        self._set_outcome(None, TooLong())
        self.on_expiry()

    def _set_outcome(self, value: Any, error: BaseException | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result((value, error))


class CallExecutor:
    """Threads and event loop that calls run on. Use it from one event loop at a time."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_THREADS)
        self.threads = Threads()
        self._async: OwnLoop | None = None

    def begin_async(self, call: _Call, work: Coroutine[Any, Any, Any]) -> None:
        if self._async is None:
            self._async = OwnLoop("hooks")
        own = self._async
        cancel = own.begin(work, call.end_from_anywhere)
        call.on_expiry = lambda: self._handle_expiry(own, cancel, call.loop)

    def _handle_expiry(
        self, own: "OwnLoop", cancel: Callable[[], object], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Cancel a late call, and replace its event loop if it does not react."""
        answered = threading.Event()
        own.call_soon(cancel)
        own.call_soon(answered.set)
        loop.call_later(STUCK_S, self._replace, own, answered)

    def _replace(self, own: "OwnLoop", answered: threading.Event) -> None:
        if self._async is own and not answered.is_set():
            own.stop()  # once it reacts again
            self._async = OwnLoop("hooks")

    def close(self) -> None:
        self.threads.close()
        if self._async is not None:
            self._async.stop()


class OwnLoop:
    """An event loop on a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        begun: Future[asyncio.AbstractEventLoop] = Future()
        self._stop_requested = asyncio.Event()
        threading.Thread(
            target=asyncio.run, args=(self._main(begun),), name=name, daemon=True
        ).start()
        self._loop = begun.result()

    async def _main(self, begun: "Future[asyncio.AbstractEventLoop]") -> None:
        begun.set_result(asyncio.get_running_loop())
        await self._stop_requested.wait()

    def begin(
        self, work: Coroutine[Any, Any, Any], on_outcome: OutcomeCallback
    ) -> Callable[[], object]:
        """Run work on this loop, and call `on_outcome` there with its outcome. Return a function
        that cancels the work; call it on this loop."""
        tasks: list[asyncio.Task[Outcome]] = []

        def ended(task: asyncio.Task[Outcome]) -> None:
            work.close()  # in case it was cancelled before it began
            on_outcome(*((None, asyncio.CancelledError()) if task.cancelled() else task.result()))

        def start() -> None:
            tasks.append(self._loop.create_task(_outcome(work)))
            tasks[0].add_done_callback(ended)

        self.call_soon(start)
        return lambda: tasks[0].cancel()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run work on this loop, and wait for its result on the calling thread."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Schedule a call on this loop; do nothing if it has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel the work on this loop and end its thread. Idempotent."""
        self.call_soon(self._stop_requested.set)


class Threads:
    """Daemon threads that each run one work item at a time, for as long as it takes."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Any]] = deque()

    def begin(self, work: Callable[[], Any], on_outcome: OutcomeCallback) -> None:
        """Run work on an idle thread or a new one, and call `on_outcome` there with its outcome."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            name = "hook"
            threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()
        inbox.put((work, on_outcome))

    def _serve(self, inbox: "SimpleQueue[Any]") -> None:
        while (item := inbox.get()) is not None:
            work, on_outcome = item
            value, error = None, None
            try:
                value = work()
            except BaseException as raised:  # even SystemExit must not end the thread
                error = raised
            self._idle.append(
                inbox
            )  # before `on_outcome`, or its receiver would start another thread
            on_outcome(value, error)
            del work, on_outcome, value, error, item

    def close(self) -> None:
        """End the idle threads."""
        while self._idle:
            self._idle.pop().put(None)


async def _outcome(work: Coroutine[Any, Any, Any]) -> Outcome:
    """Return the result or the error of work; even SystemExit, which would end the loop."""
    try:
        return await work, None
    except BaseException as error:
        return None, error


def _nothing() -> None:
    pass
