"""The ranks of a core whose keepers run elsewhere: one thread waits for them, hears them and sees
to their ends, as engine/ranks/processes.py does for ranks of this machine.

    starter   has keepers started on other machines, which then connect:
    thread    Here ... StartRank | messages -> hear(rank, message) | lines of ranks -> our stderr
              | a rank or its keeper has ended, or is silent: lost(error), all others are ended

Everybody who connects has proved itself before this thread sees it (engine/ranks/dial_in.py).
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from msgspec.structs import replace

from quire.base.config import EngineConfig
from quire.base.errors import EngineError, QuireError, RankLost
from quire.engine.ranks.alike import contradictions
from quire.engine.ranks.dial_in import Address, Arrival, Door, Role
from quire.engine.ranks.keeper_messages import (
    Farewell,
    FromKeeper,
    Here,
    Line,
    RankEnded,
    Refused,
    Started,
    StartRank,
    core_side,
    keeper_frames,
)
from quire.engine.ranks.meeting import MeetingTable, store_frames, table_codec
from quire.engine.ranks.messages import Failed, FromRank, ToRank, core_codec, frames
from quire.engine.ranks.processes import END_S, LAST_LINES, LOOK_S, READ_BYTES, Listener, RankLink
from quire.engine.wire.wire import Frames

logger = logging.getLogger("quire")

SILENT_S = 2.0  # without a message of a keeper or its rank, and its machine is gone
ORPHANED_S = 0.7  # for the keeper of a rank that has hung up to tell why
SECRET_BYTES = 32
SPIN_COUNT = "10000"  # as ranks of this machine have it
OWN_VARIABLES = ("QUIRE_MEMORY_BYTES", "QUIRE_RANK_TOKEN")  # of this machine


class RankStarter(Protocol):
    """Who has keepers of ranks started (engine/ranks/keeper.py). All is called on one thread.

    keeper: what errors call one of them. wait_s: how long they may take to come. secret: what they
    prove to know; None: one is made for this start. port: to wait at; 0: any.
    """

    keeper: str
    wait_s: float
    secret: bytes | None
    port: int

    def host(self) -> str:
        """Return the address of this machine that they reach. Raises QuireError."""
        ...

    def start(self, core: Address, secret: bytes) -> None:
        """Have a keeper of each rank started, which connects there; does not wait for them."""
        ...

    def fileno(self) -> int:
        """Return what can be read when there is news."""
        ...

    def take_news(self) -> None:
        """Raise a QuireError that says why there will be no keepers, or no longer."""
        ...

    def close(self) -> None:
        """End what was started, and give back what it had."""
        ...


@dataclass
class _Rank:
    """sockets: connections, by what they are for. heard_s: when its keeper gave a sign of life.
    hung_up_s: when it hung up itself."""

    number: int
    sockets: dict[Role, socket.socket] = field(default_factory=dict)
    frames: dict[Role, Frames] = field(
        default_factory=lambda: {
            Role.KEEPER: keeper_frames(),
            Role.RANK: frames(),
            Role.STORE: store_frames(),
        }
    )
    here: Here | None = None
    pid: int = 0
    heard_s: float = 0.0
    hung_up_s: float | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    failed: Failed | None = None
    has_ended: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.sockets) == len(self.frames)

    @property
    def last_words(self) -> str:
        if self.failed is not None:
            return f": {self.failed.kind}: {self.failed.message}"
        return ":\n  " + "\n  ".join(self.last_lines) if self.last_lines else ""

    def hang_up(self) -> None:
        for sock in list(self.sockets.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class RemoteRanks:
    """Has them started at once; they are there with the first `send_each`. listener: may be another
    one later."""

    def __init__(
        self,
        config: EngineConfig,
        starter: RankStarter,
        log_level: str,
        listener: Listener,
    ) -> None:
        self._loop = _Loop(config, starter, log_level, listener)
        self._thread = threading.Thread(target=self._loop.run, name="quire-ranks", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _close, self._loop, self._thread)

    def tell(self, listener: Listener) -> None:
        """See RankSet."""
        self._loop.tell(listener)

    @property
    def link(self) -> RankLink:
        """See RankSet."""
        return self._loop

    def shares(self) -> list[tuple[int, int]]:
        """See RankSet; waits for all. Raises what kept one from coming."""
        return self._loop.shares()

    def send_each(self, messages: Sequence[ToRank]) -> None:
        """See RankSet; waits for all. Raises what kept one from coming."""
        self._loop.wait()
        with self._loop.sending:
            for rank, message in zip(self._loop.ranks, messages, strict=True):
                self._loop.send_to(rank, self._loop.codec.encode(message))

    def close(self) -> None:
        """See RankSet."""
        self._end()


def _close(loop: "_Loop", thread: threading.Thread) -> None:
    loop.close()
    if thread is not threading.current_thread():
        thread.join(3 * END_S)


class _Loop:
    """The thread's side: it must not hold `RemoteRanks`, whose end is its own."""

    def __init__(
        self,
        config: EngineConfig,
        starter: RankStarter,
        log_level: str,
        listener: Listener,
    ) -> None:
        self.codec = core_codec()
        self.ranks = [_Rank(number) for number in range(config.parallel.num_ranks)]
        self.sending = threading.Lock()
        self.listener = listener
        self.loss: RankLost | None = None
        self._config, self._starter, self._log_level = config, starter, log_level
        self._keepers, self._stores, self._table = core_side(), table_codec(), MeetingTable()
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._complete = threading.Event()
        self._error: QuireError | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._is_closing = False
        self._losing = threading.Lock()
        self._door: Door | None = None
        self._told: set[str] = set()  # why others were refused

    # ---- for other threads -------------------------------------------------------------------

    def send(self, message: ToRank) -> None:
        """See RankLink."""
        data = self.codec.encode(message)
        with self.sending:
            for rank in self.ranks:
                self.send_to(rank, data)

    def give_up(self, rank: int, why: str) -> None:
        """See RankLink."""
        who = self.ranks[rank]
        self.lose(RankLost(f"{self._name(who)} {why}{who.last_words}"))

    def send_to(self, rank: _Rank, data: bytes) -> None:
        """Send, waiting for room. What a rank that is gone does not get, its end tells."""
        with contextlib.suppress(OSError):
            rank.sockets[Role.RANK].sendall(data)

    def wait(self) -> None:
        """Wait until all are there. Raises what kept one from it."""
        self._complete.wait()
        if self._error is not None:
            raise self._error

    def shares(self) -> list[tuple[int, int]]:
        """See RankSet."""
        self.wait()
        all_here = [rank.here for rank in self.ranks if rank.here is not None]
        found = []
        for here in all_here:
            beside = [each.free_bytes for each in all_here if each.machine == here.machine]
            found.append((len(beside), min(beside)))
        return found

    def close(self) -> None:
        self._is_closing = True
        self._wake()

    def tell(self, listener: Listener) -> None:
        with self._losing:
            self.listener = listener
            loss = self.loss
        if loss is not None:
            listener.lose(loss)

    def lose(self, error: RankLost) -> None:
        """End all, and tell the reason, the first time."""
        with self._losing:
            if self.loss is not None or self._is_closing:
                return
            self.loss = error
        if not self._complete.is_set():
            self._error = error
            self._complete.set()
        self._tell_keepers(Farewell(str(error).partition("\n")[0]))
        for rank in self.ranks:
            rank.hang_up()
        self.listener.lose(error)

    def _tell_keepers(self, message: Farewell) -> None:
        """Tell those that are there; who does not read is not waited for."""
        data = self._keepers.encode(message)
        for rank in self.ranks:
            if (sock := rank.sockets.get(Role.KEEPER)) is not None:
                with contextlib.suppress(OSError):
                    sock.send(data, socket.MSG_DONTWAIT)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")

    def _welcome(self, arrival: Arrival) -> None:
        self._arrivals.put(arrival)
        self._wake()

    # ---- the thread --------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._begin()
            while not self._is_closing:
                self._watch()
        except QuireError as error:
            self._fail(error)
        except BaseException as error:
            self._fail(RankLost(f"the ranks' watch failed ({type(error).__name__}: {error})"))
        self._end()

    def _fail(self, error: QuireError) -> None:
        if not self._complete.is_set():
            self._error = error
            self._complete.set()
        self.lose(error if isinstance(error, RankLost) else RankLost(str(error)))

    def _begin(self) -> None:
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        secret = self._starter.secret or secrets.token_bytes(SECRET_BYTES)
        self._door = Door(self._starter.host(), secret, self._welcome, self._starter.port)
        self._starter.start(self._door.address, secret)
        self._selector.register(self._starter.fileno(), selectors.EVENT_READ)
        self._until_s = time.monotonic() + self._starter.wait_s

    def _watch(self) -> None:
        # Before the select: whatever came until then is read below, also if this thread has to wait
        # for a CPU.
        now_s = time.monotonic()
        events = self._selector.select(LOOK_S)
        for key, _ in events:
            if key.fileobj is self._wake_out:
                self._wake_out.recv(64)
            elif key.data is None:
                self._starter.take_news()
            elif key.fileobj in self._selector.get_map():  # nobody else has ended it meanwhile
                self._read(*key.data)
        with contextlib.suppress(Empty):
            while True:
                self._admit(self._arrivals.get_nowait())
        self.listener.tick()
        self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Miss who does not come, and who is silent."""
        if self.loss is not None:
            return
        if not self._complete.is_set():
            if all(rank.is_complete for rank in self.ranks):
                self._complete.set()
            elif now_s > self._until_s:
                raise self._absent()
        for rank in self.ranks:
            if rank.here is not None and now_s - rank.heard_s > SILENT_S:
                self.lose(
                    RankLost(
                        f"{self._name(rank)}: its {self._starter.keeper} sent no heartbeat for"
                        f" {SILENT_S:g} s."
                    )
                )
            elif rank.hung_up_s is not None and now_s - rank.hung_up_s > ORPHANED_S:
                self.lose(RankLost(f"{self._name(rank)} has disconnected{rank.last_words}"))

    def _absent(self) -> EngineError:
        assert self._door is not None
        absent = [rank for rank in self.ranks if rank.here is None]
        late = absent or [rank for rank in self.ranks if not rank.is_complete]
        numbers = ", ".join(str(rank.number) for rank in late)
        return EngineError(
            f"rank{'s' if len(late) > 1 else ''} {numbers} of {len(self.ranks)} did not"
            f" connect to {self._door.address} within {self._starter.wait_s:g} s; "
            + ("; ".join(self._told) or "can their machines reach it?")
        )

    def _admit(self, arrival: Arrival) -> None:
        """Take a connection that has proved itself."""
        role, number, sock = arrival.role, arrival.rank, arrival.socket
        if why := self._objection(arrival):
            if role is Role.KEEPER:
                self._refuse(number, sock, why)
            sock.close()
            return
        rank = self.ranks[number]
        rank.sockets[role] = sock
        self._selector.register(sock, selectors.EVENT_READ, (rank, role))

    def _objection(self, arrival: Arrival) -> str:
        """Say why a connection is not taken; empty if it is."""
        role, number, num = arrival.role, arrival.rank, len(self.ranks)
        if self.loss is not None:
            return f"the engine ends: {self.loss}"
        if number >= num:
            parallel = self._config.parallel
            return (
                f"there is no rank {number} of {num}: machine 0 was started with"
                f" tensor_parallel_size={parallel.tensor_parallel_size} x pipeline_parallel_size="
                f"{parallel.pipeline_parallel_size} and nnodes={parallel.nnodes}; start all with"
                " the same."
            )
        rank = self.ranks[number]
        if role not in rank.frames:
            return "it is for another stage"
        if role in rank.sockets:
            where = f" by {rank.here.host}" if rank.here is not None else ""
            return f"this rank is running already{where}; is its node_rank another machine's, too?"
        return ""

    def _refuse(self, number: int, sock: socket.socket, why: str) -> None:
        """Tell a keeper, and the operator here, once for all ranks of a machine."""
        with contextlib.suppress(OSError):
            host = sock.getpeername()[0]
            sock.sendall(self._keepers.encode(Refused(why)))
            if why not in self._told:
                self._told.add(why)
                logger.warning("rank %d of the machine %s was refused: %s", number, host, why)

    def _turn_away(self, rank: _Rank, why: str) -> None:
        """Refuse a keeper that was taken, so that another one may come."""
        sock = rank.sockets.pop(Role.KEEPER)
        self._selector.unregister(sock)
        self._refuse(rank.number, sock, why)
        sock.close()
        rank.frames[Role.KEEPER] = keeper_frames()

    def _read(self, rank: _Rank, role: Role) -> None:
        sock = rank.sockets[role]
        try:
            data = sock.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(sock)
            self._hang_up(rank, role)
            return
        for body in rank.frames[role].feed(data):
            if role is Role.RANK:
                self._take(rank, body)
            elif role is Role.KEEPER:
                self._hear_keeper(rank, self._keepers.decode(body))
                if role not in rank.sockets:  # it was turned away
                    return
            else:
                self._answer(sock, body)

    def _hang_up(self, rank: _Rank, role: Role) -> None:
        """See to the end of a connection."""
        if role is Role.RANK:
            rank.hung_up_s = time.monotonic()
        elif role is Role.KEEPER and not rank.has_ended:
            rank.has_ended = True
            self.lose(
                RankLost(f"{self._name(rank)}: its {self._starter.keeper} or machine has ended.")
            )

    def _take(self, rank: _Rank, body: bytes) -> None:
        message: FromRank = self.codec.decode(body)
        rank.heard_s = time.monotonic()  # its machine lives, however late its keeper is
        if isinstance(message, Failed):
            rank.failed = message
        self.listener.hear(rank.number, message)
        if isinstance(message, Failed):
            self.lose(RankLost(f"{self._name(rank)} cannot continue{rank.last_words}"))

    def _hear_keeper(self, rank: _Rank, message: FromKeeper) -> None:
        rank.heard_s = time.monotonic()
        if isinstance(message, Here):
            if wrong := contradictions(self._config, message.settings):
                self._turn_away(rank, f"{wrong}; start all machines with the same command.")
                return
            rank.here = message
            if all(each.here is not None for each in self.ranks):
                self._start_ranks()
        elif isinstance(message, Started):
            rank.pid = message.pid
        elif isinstance(message, Line):
            rank.last_lines.append(message.text)
            label = f"rank {rank.number}: " if len(self.ranks) > 1 else ""
            with contextlib.suppress(OSError, ValueError):
                print(f"{label}{message.text}", file=sys.stderr, flush=True)
        elif isinstance(message, RankEnded):
            rank.has_ended = True
            if Role.RANK in rank.sockets and rank.sockets[Role.RANK] in self._selector.get_map():
                self._read(rank, Role.RANK)  # what it still said
            self.lose(RankLost(f"{self._name(rank)} {message.how}{rank.last_words}"))

    def _answer(self, sock: socket.socket, body: bytes) -> None:
        call = self._stores.decode(body)
        with contextlib.suppress(OSError):  # its end tells
            sock.sendall(self._stores.encode(self._table.answer(call)))

    def _start_ranks(self) -> None:
        variables = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("QUIRE_") and name not in OWN_VARIABLES
        }
        if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
            variables["GOMP_SPINCOUNT"] = SPIN_COUNT
        in_stage = self._config.parallel.tensor_parallel_size
        order = StartRank(self._config, self._log_level, variables, os.getcwd())
        for rank in self.ranks:
            behind = self.ranks[rank.number + in_stage :][:1]
            here = behind[0].here if behind else None
            mine = order
            if here is not None:
                mine = replace(order, next_host=here.host, next_port=here.port)
            with contextlib.suppress(OSError):
                rank.sockets[Role.KEEPER].sendall(self._keepers.encode(mine))

    def _name(self, rank: _Rank) -> str:
        where = [f"process {rank.pid}"] if rank.pid else []
        where += [f"on {rank.here.host}"] if rank.here is not None else []
        more = f" ({' '.join(where)})" if where else ""
        return f"rank {rank.number} of {len(self.ranks)}{more}"

    def _end(self) -> None:
        """End all: a rank goes when its stream ends, and its keeper after it."""
        if self._door is not None:
            self._door.close()
        if self.loss is None:
            self._tell_keepers(Farewell())
        for rank in self.ranks:
            if Role.RANK in rank.sockets:
                with contextlib.suppress(OSError):
                    rank.sockets[Role.RANK].shutdown(socket.SHUT_RDWR)
        if self.loss is None:
            self._wait_for_keepers()
        with contextlib.suppress(Empty):
            while True:
                self._arrivals.get_nowait().socket.close()
        for rank in self.ranks:
            rank.hang_up()
            for sock in rank.sockets.values():
                sock.close()
        self._starter.close()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _wait_for_keepers(self) -> None:
        until_s = time.monotonic() + END_S
        for rank in self.ranks:
            sock = rank.sockets.get(Role.KEEPER)
            if sock is None:
                continue
            with contextlib.suppress(OSError):
                while (left_s := until_s - time.monotonic()) > 0:
                    sock.settimeout(left_s)
                    if not sock.recv(READ_BYTES):
                        break
