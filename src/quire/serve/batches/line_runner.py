"""Runner of a batch: it sends the lines through the app and writes the result of each line.

It keeps the engine full: a line is open for each slot, and all batches share the slots in turn. A
failed line is written as an error, and the other lines continue. A line is sent again if the server
cannot take it now (503) or if its key has reached a limit (429).
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from quire.base.errors import EngineDead
from quire.serve.batches.app_caller import BATCH_URLS, AppCaller, Reply
from quire.serve.batches.input_index import InputIndex
from quire.serve.batches.journal import Journal
from quire.serve.batches.lines import (
    Failure,
    Line,
    LineError,
    OutputLine,
    Response,
    custom_id_of,
    shown_id,
)
from quire.serve.batches.tally import Tally
from quire.serve.bodies.reading import ON_LOOP_BYTES


class Slots:
    """Weighted FIFO semaphore: smaller requests do not overtake a large one."""

    def __init__(self, number: int) -> None:
        self._number = self._free = max(1, number)
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_requested: int) -> int:
        """Wait for `num_requested` slots, or for all if there are fewer. Return the number
        taken."""
        number = min(num_requested, self._number)
        if self._waiting or self._free < number:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((number, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self.give(number)
                self._waiting = deque(each for each in self._waiting if each[1] is not turn)
                self._wake()
                raise
        else:
            self._free -= number
        return number

    def give(self, number: int) -> None:
        """Return slots that were taken."""
        self._free += number
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            number, turn = self._waiting.popleft()
            if not turn.done():
                self._free -= number
                turn.set_result(None)


UNAVAILABLE = (429, 503)
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 5.0
DEAD = re.compile(rb'"code":\s*"engine_dead"')
CANCEL_AGAIN_S = 0.2
YIELD_EVERY = 64  # lines written without a request before the event loop runs again


@dataclass(frozen=True)
class LineOptions:
    """Options of a run. priority: priority of all requests; None keeps their own. ends_with_engine:
    raise EngineDead if the engine dies, instead of waiting for its restart."""

    priority: int | None = None
    ends_with_engine: bool = False


DEFAULTS = LineOptions()


class LineRunner:
    """Runner of one batch. tally: counts of finished lines, including earlier runs."""

    def __init__(
        self, index: InputIndex, journal: Journal, options: LineOptions = DEFAULTS
    ) -> None:
        """Read the journal. Raise RequestError if it belongs to another input."""
        self.tally = Tally()
        self._index, self._journal, self._options = index, journal, options
        self._is_done = bytearray(len(index))
        for position in journal.resume(index, self.tally):
            self._is_done[position] = True
        self._open: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def is_complete(self) -> bool:
        return all(self._is_done)

    async def run(
        self, caller: AppCaller, slots: Slots, is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Run all unfinished lines. Once `is_stopped`, no new line starts, and open lines finish.
        Raise the error that kept a line from being written."""
        try:
            for position in self._to_do():
                if is_stopped() or self._error is not None:
                    break
                await self._begin(position, caller, slots, is_stopped)
            while self._open and self._error is None:
                await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
        finally:
            await self._cancel_open()

    async def fail_rest(self, code: str, message: str) -> None:
        """Write an error for every unfinished line."""
        for number, position in enumerate(self._to_do()):
            data, digest = self._index.data(position)
            failure = Failure(code, message)
            self._write(position, OutputLine(shown_id(digest), custom_id_of(data), None, failure))
            if number % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    def _to_do(self) -> Iterator[int]:
        return (position for position in map(int, self._index.order) if not self._is_done[position])

    async def _begin(
        self, position: int, caller: AppCaller, slots: Slots, is_stopped: Callable[[], bool]
    ) -> None:
        """Send a line as soon as there is a slot for it."""
        if self._index.size(position) > ON_LOOP_BYTES:
            digest, line = await asyncio.to_thread(self._read, position)
        else:
            digest, line = self._read(position)
        if isinstance(line, OutputLine):
            self._write(position, line)
            await asyncio.sleep(0)
            return
        taken = await slots.take(line.num_sequences)
        if is_stopped():
            slots.give(taken)
            return
        task = asyncio.create_task(self._answer(caller, position, digest, line))
        self._open.add(task)
        task.add_done_callback(self._end)
        task.add_done_callback(lambda _: slots.give(taken))

    def _read(self, position: int) -> tuple[bytes, Line | OutputLine]:
        """Return a line's id, and the parsed line or the output of an invalid line."""
        data, digest = self._index.data(position)
        try:
            return digest, self._index.parse(position, data, BATCH_URLS)
        except LineError as error:
            failure = Failure(error.code, error.message)
            return digest, OutputLine(shown_id(digest), custom_id_of(data), None, failure)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._open.discard(task)
        if not task.cancelled() and task.exception() is not None and self._error is None:
            self._error = task.exception()

    async def _answer(self, caller: AppCaller, position: int, digest: bytes, line: Line) -> None:
        body = line.body_of(self._options.priority)
        pause_s = FIRST_PAUSE_S
        reply = await caller.post(line.url, body)
        while reply.status in UNAVAILABLE:
            if self._options.ends_with_engine and DEAD.search(reply.body):
                raise EngineDead("the engine has stopped.")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            reply = await caller.post(line.url, body)
        self._write(position, OutputLine(shown_id(digest), line.custom_id, _response(reply), None))

    def _write(self, position: int, line: OutputLine) -> None:
        self._journal.append(line)
        self._is_done[position] = True
        self.tally.add(line)

    async def _cancel_open(self) -> None:
        """Cancel the open lines until all have ended. Before Python 3.12, code that awaits with
        `asyncio.wait_for`, as hooks may, can lose a cancellation."""
        while self._open:
            for task in self._open:
                task.cancel()
            await asyncio.wait(set(self._open), timeout=CANCEL_AGAIN_S)


def _response(reply: Reply) -> Response:
    """Return the response to write, with its body on one line."""
    body = reply.body if b"\n" not in reply.body else _on_one_line(reply.body)
    return Response(reply.status, reply.request_id, msgspec.Raw(body or b"null"))


def _on_one_line(body: bytes) -> bytes:
    try:
        return msgspec.json.format(body, indent=-1)
    except msgspec.DecodeError:
        return msgspec.json.encode(body.decode("utf-8", "replace"))
