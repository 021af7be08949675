"""Calls of foreign code that may raise or hang, from an event loop that must do neither.

Plain methods run on threads, async ones on an event loop of their own, so that nothing that they do
holds up the loop that awaits them. A call that takes too long is left to itself: its thread is no
longer counted, and a loop that it blocks is replaced (async calls that are on it may be late, too).
How many such calls there may be of one hook is bounded; while they hang, whoever needs that hook
fails at once.
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

MAX_THREADS = 32  # that work at once; others wait
MAX_HUNG = 8  # calls of one hook that took too long and go on
STUCK_S = 1.0  # an event loop that answers nobody for as long is blocked

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]  # what a call returned, or raised
Tell = Callable[[Any, BaseException | None], None]


class TooLong(Exception):
    """The call did not end in time."""


class Unavailable(Exception):
    """As many calls as may hang do."""


class Caller:
    """Calls the methods of one hook. num_hung: calls that took too long and have not ended."""

    def __init__(self, lanes: "CallLanes", timeout_s: float) -> None:
        self.num_hung = 0
        self._lanes = lanes
        self._timeout_s = timeout_s

    async def call(self, method: Callable[[T], Any], thing: T) -> Outcome:
        """Return what the method returns or raises: also TooLong, and Unavailable if it is not
        called. Raises nothing but CancelledError, for whoever awaits it."""
        lanes = self._lanes
        if inspect.iscoroutinefunction(method):
            if self.num_hung >= MAX_HUNG:
                return None, Unavailable()
            call = _Call(self, self._timeout_s, _nothing)
            lanes.begin_async(call, method(thing))
            return await call.outcome
        await lanes.slots.acquire()
        if self.num_hung >= MAX_HUNG:
            lanes.slots.release()
            return None, Unavailable()
        call = _Call(self, self._timeout_s, lanes.slots.release)
        lanes.threads.begin(lambda: method(thing), call.end_from_anywhere)
        return await call.outcome


class _Call:
    """One call, which ends in time or is late; on the loop that awaits it. Who awaits it may leave:
    it is counted until it has ended or is late.

    free: gives back what it occupies. when_late: what else to do then.
    """

    def __init__(self, caller: Caller, timeout_s: float, free: Callable[[], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[Outcome] = self.loop.create_future()
        self.when_late: Callable[[], object] = _nothing
        self._caller = caller
        self._free = free
        self._is_late = False
        self._timer = self.loop.call_later(timeout_s, self._expire)

    def end_from_anywhere(self, value: Any, error: BaseException | None) -> None:
        """Take what came out of it, on any thread."""
        with suppress(RuntimeError):  # the loop has been closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._end, value, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        if self._is_late:
            self._caller.num_hung -= 1
            return
        self._timer.cancel()
        self._free()
        self._tell(value, error)

    def _expire(self) -> None:
        self._is_late = True
        self._caller.num_hung += 1
        self._free()
        self._tell(None, TooLong())
        self.when_late()

    def _tell(self, value: Any, error: BaseException | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result((value, error))


class CallLanes:
    """Where calls run. To be used from one event loop at a time."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(MAX_THREADS)
        self.threads = Threads()
        self._async: OwnLoop | None = None

    def begin_async(self, call: _Call, work: Coroutine[Any, Any, Any]) -> None:
        if self._async is None:
            self._async = OwnLoop("hooks")
        own = self._async
        cancel = own.begin(work, call.end_from_anywhere)
        call.when_late = lambda: self._when_late(own, cancel, call.loop)

    def _when_late(
        self, own: "OwnLoop", cancel: Callable[[], object], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Cancel it, and see whether it holds up the others."""
        answered = threading.Event()
        own.call_soon(cancel)
        own.call_soon(answered.set)
        loop.call_later(STUCK_S, self._replace, own, answered)

    def _replace(self, own: "OwnLoop", answered: threading.Event) -> None:
        if self._async is own and not answered.is_set():
            own.stop()  # as soon as it can
            self._async = OwnLoop("hooks")

    def close(self) -> None:
        self.threads.close()
        if self._async is not None:
            self._async.stop()


class OwnLoop:
    """An event loop on a thread of its own, which ends with the program."""

    def __init__(self, name: str) -> None:
        begun: Future[asyncio.AbstractEventLoop] = Future()
        self._asked = asyncio.Event()
        threading.Thread(
            target=asyncio.run, args=(self._main(begun),), name=name, daemon=True
        ).start()
        self._loop = begun.result()

    async def _main(self, begun: "Future[asyncio.AbstractEventLoop]") -> None:
        begun.set_result(asyncio.get_running_loop())
        await self._asked.wait()

    def begin(self, work: Coroutine[Any, Any, Any], tell: Tell) -> Callable[[], object]:
        """Run it; tell, there, what came of it. Return what cancels it, to be called there."""
        tasks: list[asyncio.Task[Outcome]] = []

        def ended(task: asyncio.Task[Outcome]) -> None:
            work.close()  # of one that was cancelled before it began
            tell(*((None, asyncio.CancelledError()) if task.cancelled() else task.result()))

        def start() -> None:
            tasks.append(self._loop.create_task(_outcome(work)))
            tasks[0].add_done_callback(ended)

        self.call_soon(start)
        return lambda: tasks[0].cancel()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there, and wait for it on another thread."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def call_soon(self, function: Callable[[], object]) -> None:
        """Have it called there, unless the loop has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Cancel what runs there, and end the thread. A second call does nothing."""
        self.call_soon(self._asked.set)


class Threads:
    """Threads that do one thing after another and end with the program, however long that is."""

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[Any]] = deque()

    def begin(self, work: Callable[[], Any], tell: Tell) -> None:
        """Do the work on a thread that is idle, or on another one; tell, there, what came of it."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            name = "hook"
            threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()
        inbox.put((work, tell))

    def _serve(self, inbox: "SimpleQueue[Any]") -> None:
        while (item := inbox.get()) is not None:
            work, tell = item
            value, error = None, None
            try:
                value = work()
            except BaseException as raised:  # SystemExit too: it ends a request, not a thread
                error = raised
            self._idle.append(inbox)  # before anybody knows, who would start another thread
            tell(value, error)
            del work, tell, value, error, item

    def close(self) -> None:
        """End those that are idle."""
        while self._idle:
            self._idle.pop().put(None)


async def _outcome(work: Coroutine[Any, Any, Any]) -> Outcome:
    """Return what it returns or raises: SystemExit too, which would end the loop."""
    try:
        return await work, None
    except BaseException as error:
        return None, error


def _nothing() -> None:
    pass
