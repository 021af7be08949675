"""Ranks of a core, and the thread that watches them, wherever they run.

    thread   begin ... | messages -> hear(rank, message) | lines of ranks -> our stderr | tick
             | one rank is lost: lose(error), and all others are ended

A transport starts ranks, connects to them and ends them: `RankProcesses` (processes.py) as child
processes, `RemoteRanks` (remote.py) on other machines. Any thread may send. A rank that does not
read blocks its sender only until the rank is lost.
"""

import contextlib
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.base.errors import QuireError, RankLost
from quire.engine.ranks.messages import Failed, FromRank, Stream, ToRank, core_codec

END_S = 5.0  # for a rank to end by itself
LOOK_S = 0.3  # between two checks of conditions that cause no event
LAST_LINES = 12  # lines of a rank's stderr in an error


class RankLink(Protocol):
    """Sender of messages to all ranks, from any thread."""

    def send(self, message: ToRank) -> None:
        """Send a message to all ranks. Messages of several threads reach all in the same order."""
        ...

    def give_up(self, rank: int, why: str) -> None:
        """End all ranks, unless one was lost before. The listener gets this rank's name and the
        reason."""
        ...


class Listener(Protocol):
    """Listener to the ranks' messages, called on the thread that watches them."""

    def hear(self, rank: int, message: FromRank) -> None:
        """Handle a message from a rank."""
        ...

    def lose(self, error: RankLost) -> None:
        """Note that all ranks are lost. Called once, and only before `close`, perhaps from another
        thread."""
        ...

    def tick(self) -> None:
        """Check deadlines; called some times a second."""
        ...


@dataclass(kw_only=True)
class Rank:
    """Rank as its core sees it."""

    number: int
    stream: Stream[FromRank] | None = None  # for plans and results
    pid: int = 0
    host: str = ""  # empty: this machine
    hung_up_s: float | None = None  # when the stream ended
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    failed: Failed | None = None

    @property
    def last_words(self) -> str:
        if self.failed is not None:
            return f": {self.failed.kind}: {self.failed.message}"
        return ":\n  " + "\n  ".join(self.last_lines) if self.last_lines else ""


class Transport(Protocol):
    """Interface to start ranks, connect to them and end them. The watch calls it on its own thread,
    except for `stop` and `shares`."""

    @property
    def ranks(self) -> Sequence[Rank]:
        """Return the ranks, by number."""
        ...

    def begin(self, watch: "RankWatch") -> None:
        """Start the ranks and register their files with the watch's selector. Raises QuireError."""
        ...

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks are connected."""
        ...

    def shares(self) -> list[tuple[int, int]]:
        """Return for each rank the number of ranks on its machine and the machine's free bytes."""
        ...

    def look(self, now_s: float) -> None:
        """Find absent, silent or stopped ranks. Raise QuireError to end all ranks."""
        ...

    def stop(self, error: RankLost) -> None:
        """End all ranks at once; called on any thread."""
        ...

    def end(self, loss: RankLost | None) -> None:
        """Wait for all ranks to end, and free everything."""
        ...


class RankSet:
    """Owner of a transport and its thread, which end with it. listener: first listener;
    `link.set_listener` replaces it."""

    def __init__(self, transport: Transport, listener: Listener) -> None:
        self.link = RankWatch(transport, listener)
        self._transport = transport
        thread = threading.Thread(target=self.link.run, name="quire-ranks", daemon=True)
        thread.start()
        self._end = weakref.finalize(self, _close, self.link, thread)

    def wait(self) -> None:
        """Wait until all ranks are connected. If one fails, end all ranks and raise its error."""
        try:
            self.link.wait()
        except BaseException:
            self.close()
            raise

    def shares(self) -> list[tuple[int, int]]:
        """See Transport; waits for all ranks."""
        self.wait()
        return self._transport.shares()

    def close(self) -> None:
        """End all ranks. A second call does nothing."""
        self._end()


def _close(watch: "RankWatch", thread: threading.Thread) -> None:
    watch.close()
    if thread is not threading.current_thread():
        thread.join(3 * END_S)


class RankWatch:
    """State of the watching thread. It must not refer to its RankSet: the thread ends when the set
    is garbage-collected."""

    def __init__(self, transport: Transport, listener: Listener) -> None:
        self.selector = selectors.DefaultSelector()  # each file's data is its handler
        self.loss: RankLost | None = None
        self._transport, self._listener = transport, listener
        self._codec = core_codec()
        self._wake_in, self._wake_out = socket.socketpair()
        self._sending, self._losing = threading.Lock(), threading.Lock()
        self._complete = threading.Event()  # all ranks are connected, or `_error` is set
        self._error: QuireError | None = None  # error that prevented a connection
        self._is_closing = False

    # ---- for other threads -------------------------------------------------------------------

    def send(self, message: ToRank) -> None:
        """See RankLink."""
        data = self._codec.encode(message)
        with self._sending:
            for rank in self._transport.ranks:
                _send(rank, data)

    def send_each(self, messages: Sequence[ToRank]) -> None:
        """Send each rank a message of its own."""
        with self._sending:
            for rank, message in zip(self._transport.ranks, messages, strict=True):
                _send(rank, self._codec.encode(message))

    def give_up(self, rank: int, why: str) -> None:
        """See RankLink."""
        lost = self._transport.ranks[rank]
        self.lose(RankLost(f"{self.name(lost)} {why}{lost.last_words}"))

    def lose(self, error: RankLost) -> None:
        """End all ranks and report the error to the listener; only the first call has effect."""
        with self._losing:
            if self.loss is not None or self._is_closing:
                return
            self.loss = error
        self._set_complete(error)
        self._transport.stop(error)
        self._listener.lose(error)

    def set_listener(self, listener: Listener) -> None:
        """Replace the listener, and report the loss to the new one if a rank is lost already."""
        with self._losing:
            self._listener = listener
            loss = self.loss
        if loss is not None:
            listener.lose(loss)

    def wait(self) -> None:
        """Wait until all ranks are connected. Raises the error that prevented it."""
        self._complete.wait()
        if self._error is not None:
            raise self._error

    def wake(self) -> None:
        """Wake the thread, so that it checks the transport now."""
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")

    def close(self) -> None:
        """Request that the thread end all ranks and itself."""
        self._is_closing = True
        self.wake()

    def name(self, rank: Rank) -> str:
        """Return a rank's name for error messages."""
        where = [f"process {rank.pid}"] if rank.pid else []
        where += [f"on {rank.host}"] if rank.host else []
        more = f" ({' '.join(where)})" if where else ""
        return f"rank {rank.number} of {len(self._transport.ranks)}{more}"

    # ---- the thread --------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self.selector.register(self._wake_out, selectors.EVENT_READ, self._take_wakes)
            self._transport.begin(self)
            while not self._is_closing:
                if not self._complete.is_set() and self._transport.is_complete:
                    self._set_complete()
                self._watch()
        except QuireError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(RankLost(f"the ranks' watch failed ({type(error).__name__}: {error})"))
        self._transport.end(self.loss)
        self.selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _watch(self) -> None:
        # Read the clock before the select. So all messages up to this time are read before `look`
        # judges silence, even if this thread waits for a CPU.
        now_s = time.monotonic()
        for key, _ in self.selector.select(LOOK_S):
            if key.fileobj in self.selector.get_map():  # no earlier handler has unregistered it
                key.data()
        self._listener.tick()
        self._transport.look(now_s)

    def _take_wakes(self) -> None:
        self._wake_out.recv(64)

    def _set_complete(self, error: QuireError | None = None) -> None:
        """Let `wait` return, or raise `error`; only the first call has effect."""
        if not self._complete.is_set():
            self._error = error
            self._complete.set()

    def _fail(self, error: QuireError) -> None:
        self._set_complete(error)
        self.lose(error if isinstance(error, RankLost) else RankLost(str(error)))

    # ---- for the transport, on the thread ----------------------------------------------------

    def read(self, rank: Rank) -> None:
        """Pass a rank's messages to the listener, and note the end of its stream."""
        assert rank.stream is not None
        messages = rank.stream.receive()
        if messages is None:
            self.selector.unregister(rank.stream.socket)
            rank.hung_up_s = time.monotonic()
            return
        for message in messages:
            if isinstance(message, Failed):
                rank.failed = message
            self._listener.hear(rank.number, message)
            if isinstance(message, Failed):
                self.give_up(rank.number, "cannot continue")

    def pass_on(self, rank: Rank, line: str) -> None:
        """Write a line of a rank's stderr to ours, and remember it for errors."""
        rank.last_lines.append(line)
        label = f"rank {rank.number}: " if len(self._transport.ranks) > 1 else ""
        with contextlib.suppress(OSError, ValueError):
            print(f"{label}{line}", file=sys.stderr, flush=True)


def _send(rank: Rank, data: bytes) -> None:
    """Send data to a rank, waiting for room. Ignore a closed connection; its end is read later."""
    assert rank.stream is not None
    with contextlib.suppress(OSError):
        rank.stream.socket.sendall(data)
