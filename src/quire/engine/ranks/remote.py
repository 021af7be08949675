"""Transport for ranks on other machines, whose node agents connect to the core over TCP.

    starter   starts node agents, which then connect:
    thread    Here ... StartRank | messages of ranks, lines, heartbeats | store calls
              | a rank or its agent has ended, or is silent: end all others

Each connection is authenticated before the thread sees it (engine/ranks/connections.py).
"""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from msgspec.structs import replace

from quire.base.errors import EngineError, RankLost
from quire.base.settings.config import EngineConfig
from quire.engine.ranks.connections import Address, Arrival, AuthenticatingListener, Role
from quire.engine.ranks.consistency import contradictions
from quire.engine.ranks.messages import (
    Endpoint,
    Farewell,
    FromAgent,
    Line,
    RankEnded,
    Refused,
    Started,
    StartRank,
    Stream,
    core_agent_codec,
    core_codec,
)
from quire.engine.ranks.rank_set import END_S, Rank, RankWatch
from quire.engine.ranks.rendezvous import RendezvousTable, core_store_codec
from quire.engine.wire.spawn import spin_settings
from quire.engine.wire.wire import Codec

logger = logging.getLogger("quire")

SILENT_S = 2.0  # without a message of a node agent, its machine counts as lost
ORPHANED_S = 0.7  # wait for the agent's reason after its rank has disconnected
SECRET_BYTES = 32
OWN_VARIABLES = ("QUIRE_MEMORY_BYTES", "QUIRE_RANK_TOKEN")  # not sent to other machines


class RankStarter(Protocol):
    """Starter of node agents (engine/ranks/node_agent.py). One thread makes all calls.

    agent_name: name of an agent in error messages. wait_s: time limit for the agents' connections.
    secret: agents must have it; None: the core generates one. port: port of the core; 0: any.
    """

    agent_name: str
    wait_s: float
    secret: bytes | None
    port: int

    def host(self) -> str:
        """Return the address at which agents reach this machine. Raises QuireError."""
        ...

    def start(self, core: Address, secret: bytes) -> None:
        """Start an agent for each rank, or have it started, without waiting for connections."""
        ...

    def fileno(self) -> int:
        """Return a file descriptor that is readable when there is news."""
        ...

    def take_news(self) -> None:
        """Read the news. Raise a QuireError if agents cannot start or have ended."""
        ...

    def close(self) -> None:
        """End the started processes and free their resources."""
        ...


@dataclass(kw_only=True)
class _FarRank(Rank):
    """Rank on another machine. streams: connections by role. here: the agent's first message."""

    last_message_s: float = 0.0  # time of the agent's last message
    streams: dict[Role, Stream[Any]] = field(default_factory=dict)
    here: Endpoint | None = None
    has_ended: bool = False

    def hang_up(self) -> None:
        for stream in list(self.streams.values()):
            with contextlib.suppress(OSError):
                stream.socket.shutdown(socket.SHUT_RDWR)


class RemoteRanks:
    """Transport for ranks that node agents start on other machines."""

    def __init__(self, config: EngineConfig, starter: RankStarter, log_level: str) -> None:
        self.ranks = [_FarRank(number=number) for number in range(config.parallel.num_ranks)]
        self._config, self._starter, self._log_level = config, starter, log_level
        self._codecs: dict[Role, Codec[Any]] = {
            Role.NODE_AGENT: core_agent_codec(),
            Role.RANK: core_codec(),
            Role.STORE: core_store_codec(),
        }
        self._table = RendezvousTable()
        self._arrivals: SimpleQueue[Arrival] = SimpleQueue()
        self._door: AuthenticatingListener | None = None
        self._refusals: set[str] = set()  # reasons for refusals, each logged once

    def begin(self, watch: RankWatch) -> None:
        """See Transport."""
        self._watch = watch
        secret = self._starter.secret or secrets.token_bytes(SECRET_BYTES)
        self._door = AuthenticatingListener(
            self._starter.host(), secret, self._welcome, self._starter.port
        )
        self._starter.start(self._door.address, secret)
        watch.selector.register(
            self._starter.fileno(), selectors.EVENT_READ, self._starter.take_news
        )
        self._until_s = time.monotonic() + self._starter.wait_s

    def _welcome(self, arrival: Arrival) -> None:
        self._arrivals.put(arrival)
        self._watch.wake()

    @property
    def is_complete(self) -> bool:
        """See Transport."""
        return all(self._is_connected(rank) for rank in self.ranks)

    def _is_connected(self, rank: _FarRank) -> bool:
        return len(rank.streams) == len(self._codecs)

    def shares(self) -> list[tuple[int, int]]:
        """See Transport."""
        all_here = [rank.here for rank in self.ranks if rank.here is not None]
        found = []
        for here in all_here:
            on_machine = [each.free_bytes for each in all_here if each.machine == here.machine]
            found.append((len(on_machine), min(on_machine)))
        return found

    def stop(self, error: RankLost) -> None:
        """See Transport."""
        self._notify_agents(Farewell(str(error).partition("\n")[0]))
        for rank in self.ranks:
            rank.hang_up()

    def _notify_agents(self, message: Farewell) -> None:
        """Send a farewell to all connected agents, without waiting for agents that do not read."""
        data = self._codecs[Role.NODE_AGENT].encode(message)
        for rank in self.ranks:
            if (stream := rank.streams.get(Role.NODE_AGENT)) is not None:
                with contextlib.suppress(OSError):
                    stream.socket.send(data, socket.MSG_DONTWAIT)

    def look(self, now_s: float) -> None:
        """See Transport."""
        with contextlib.suppress(Empty):
            while True:
                self._admit(self._arrivals.get_nowait())
        if self._watch.loss is not None:
            return
        if now_s > self._until_s and not self.is_complete:
            raise self._absent()
        for rank in self.ranks:
            if rank.here is not None and now_s - rank.last_message_s > SILENT_S:
                self._lose(
                    rank, f"its {self._starter.agent_name} sent no heartbeat for {SILENT_S:g} s."
                )
            elif rank.hung_up_s is not None and now_s - rank.hung_up_s > ORPHANED_S:
                self._watch.give_up(rank.number, "has disconnected")

    def _lose(self, rank: _FarRank, why: str) -> None:
        self._watch.lose(RankLost(f"{self._watch.name(rank)}: {why}"))

    def _absent(self) -> EngineError:
        assert self._door is not None
        absent = [rank for rank in self.ranks if rank.here is None]
        late = absent or [rank for rank in self.ranks if not self._is_connected(rank)]
        numbers = ", ".join(str(rank.number) for rank in late)
        return EngineError(
            f"rank{'s' if len(late) > 1 else ''} {numbers} of {len(self.ranks)} did not"
            f" connect to {self._door.address} within {self._starter.wait_s:g} s; "
            + ("; ".join(self._refusals) or "can their machines reach it?")
        )

    def _admit(self, arrival: Arrival) -> None:
        """Register an authenticated connection with its rank, or refuse it."""
        role, number, sock = arrival.role, arrival.rank, arrival.socket
        if why := self._refusal_reason(arrival):
            if role is Role.NODE_AGENT:
                self._refuse(number, sock, why)
            sock.close()
            return
        rank = self.ranks[number]
        stream = rank.streams[role] = Stream(sock, self._codecs[role])
        if role is Role.RANK:
            rank.stream = stream
        see = {Role.RANK: self._watch.read, Role.NODE_AGENT: self._hear, Role.STORE: self._answer}
        self._watch.selector.register(sock, selectors.EVENT_READ, partial(see[role], rank))

    def _refusal_reason(self, arrival: Arrival) -> str:
        """Return the reason for refusing a connection; empty if it is accepted."""
        role, number, num = arrival.role, arrival.rank, len(self.ranks)
        if (loss := self._watch.loss) is not None:
            return f"the engine ends: {loss}"
        if number >= num:
            parallel = self._config.parallel
            return (
                f"there is no rank {number} of {num}: machine 0 was started with"
                f" tensor_parallel_size={parallel.tensor_parallel_size} x pipeline_parallel_size="
                f"{parallel.pipeline_parallel_size} and nnodes={parallel.nnodes}; start all with"
                " the same."
            )
        rank = self.ranks[number]
        if role not in self._codecs:
            return "it is for another stage"
        if role in rank.streams:
            where = f" by {rank.here.host}" if rank.here is not None else ""
            return f"this rank is running already{where}; is its node_rank another machine's, too?"
        return ""

    def _refuse(self, number: int, sock: socket.socket, why: str) -> None:
        """Send a refusal to an agent, and log each reason once."""
        with contextlib.suppress(OSError):
            host = sock.getpeername()[0]
            sock.sendall(self._codecs[Role.NODE_AGENT].encode(Refused(why)))
            if why not in self._refusals:
                self._refusals.add(why)
                logger.warning("rank %d of the machine %s was refused: %s", number, host, why)

    def _refuse_accepted(self, rank: _FarRank, why: str) -> None:
        """Refuse an agent that was accepted before, so that another agent can connect."""
        sock = rank.streams.pop(Role.NODE_AGENT).socket
        self._watch.selector.unregister(sock)
        self._refuse(rank.number, sock, why)
        sock.close()

    def _hear(self, rank: _FarRank) -> None:
        """Handle an agent's messages. The end of its connection means that its rank is lost."""
        stream = rank.streams[Role.NODE_AGENT]
        messages = stream.receive()
        if messages is None:
            self._watch.selector.unregister(stream.socket)
            if not rank.has_ended:
                rank.has_ended = True
                self._lose(rank, f"its {self._starter.agent_name} or machine has ended.")
            return
        rank.last_message_s = time.monotonic()
        for message in messages:
            if Role.NODE_AGENT in rank.streams:  # the agent was not refused
                self._take(rank, message)

    def _take(self, rank: _FarRank, message: FromAgent) -> None:
        if isinstance(message, Endpoint):
            if wrong := contradictions(self._config, message.settings):
                self._refuse_accepted(rank, f"{wrong}; start all machines with the same command.")
                return
            rank.here, rank.host = message, message.host
            if all(each.here is not None for each in self.ranks):
                self._start_ranks()
        elif isinstance(message, Started):
            rank.pid = message.pid
        elif isinstance(message, Line):
            self._watch.pass_on(rank, message.text)
        elif isinstance(message, RankEnded):
            rank.has_ended = True
            if rank.stream is not None and rank.hung_up_s is None:
                self._watch.read(rank)  # its last messages
            self._watch.give_up(rank.number, message.end_text)

    def _answer(self, rank: _FarRank) -> None:
        """Answer a rank's calls to the store."""
        stream = rank.streams[Role.STORE]
        calls = stream.receive()
        if calls is None:
            self._watch.selector.unregister(stream.socket)
        for call in calls or ():
            try:
                answer = self._table.answer(call)
            except ValueError as error:
                self._watch.give_up(rank.number, f"sent a malformed call to the store: {error}")
                return
            with contextlib.suppress(OSError):  # the next read detects a closed connection
                stream.send(answer)

    def _start_ranks(self) -> None:
        variables = {
            name: value
            for name, value in os.environ.items()
            if name.startswith("QUIRE_") and name not in OWN_VARIABLES
        }
        variables |= spin_settings(os.environ)
        in_stage = self._config.parallel.tensor_parallel_size
        order = StartRank(self._config, self._log_level, variables, os.getcwd())
        for rank in self.ranks:
            next_ranks = self.ranks[rank.number + in_stage :][:1]
            here = next_ranks[0].here if next_ranks else None
            mine = order
            if here is not None:
                mine = replace(order, next_host=here.host, next_port=here.port)
            with contextlib.suppress(OSError):
                rank.streams[Role.NODE_AGENT].send(mine)

    def end(self, loss: RankLost | None) -> None:
        """See Transport: a rank ends when its stream does, and its agent after it."""
        if self._door is not None:
            self._door.close()
        if loss is None:
            self._notify_agents(Farewell())
        for rank in self.ranks:
            if rank.stream is not None:
                with contextlib.suppress(OSError):
                    rank.stream.socket.shutdown(socket.SHUT_RDWR)
        if loss is None:
            self._wait_for_agents()
        with contextlib.suppress(Empty):
            while True:
                self._arrivals.get_nowait().socket.close()
        for rank in self.ranks:
            rank.hang_up()
            for stream in rank.streams.values():
                stream.socket.close()
        self._starter.close()

    def _wait_for_agents(self) -> None:
        until_s = time.monotonic() + END_S
        for rank in self.ranks:
            stream = rank.streams.get(Role.NODE_AGENT)
            while stream is not None and (left_s := until_s - time.monotonic()) > 0:
                stream.socket.settimeout(left_s)
                if stream.receive() is None:
                    break
