"""Stores of KV blocks with ranks: each rank moves its own parts of the blocks.

    core     orders of the scheduler  -> StoreOrders  -> all ranks
    rank 0   its part of each block <-> the stores    -> StoreAnswers
    rank 1   its part of each block <-> the stores    -> StoreAnswers
    core     one answer per order, once all ranks have answered

A part is a value of its own in a store, under the fingerprint of its rank
(`connectors/identity.py`). A block counts as found, fetched or kept only if all its parts do.
Otherwise it is a miss, and the parts that were moved are overwritten or expire.

The ranks end overdue orders themselves, so the core has no deadline of its own. If a rank ends, the
engine ends.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import msgspec

from quire.base.clock import Clock, MonotonicClock
from quire.base.errors import ConfigError, RankLost
from quire.base.kv_orders import Answer, LookedUp, Order, Removed
from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.secrets import SecretUrl
from quire.engine.connectors.connections import OpenStores
from quire.engine.connectors.make import SharedHostMemory, open_stores
from quire.engine.ranks.messages import (
    CloseStores,
    CoreDisconnected,
    Failed,
    FromRank,
    StoreAnswers,
    StoreOrders,
    StoresClosed,
)

logger = logging.getLogger("quire")

ONE_PROCESS = ("serve", "peer")  # stores that share the host memory of one process
MIN_WAIT_S = 0.05  # between two checks for overdue orders
CLOSING_S = 2.0  # for the last answers, after the time limit of closing
LOOK_S = 0.1  # between two checks whether the ranks are lost

Command = StoreOrders | CloseStores | None  # None: an answer has arrived


def check_stores(cache: CacheConfig) -> None:
    """Raise ConfigError for a store that ranks cannot use."""
    for setting in cache.stores:
        if setting.partition(":")[0] in ONE_PROCESS:
            raise ConfigError(
                f"{SecretUrl(setting)!r} shares the host memory of one process, but ranks divide"
                " the blocks of this model; use dir:PATH, shm:NAME or a store server."
            )


def open_part(
    cache: CacheConfig,
    fingerprint: bytes,
    memory: SharedHostMemory | None,
    backend_name: str,
    send: Callable[[FromRank], None],
) -> "RankStores":
    """Open the configured stores for one rank. Raises ConfigError if a store cannot be opened, or
    if the attention backend does not share its blocks."""
    commands: SimpleQueue[Command] = SimpleQueue()
    stores = open_stores(cache, fingerprint, memory, backend_name, lambda: commands.put(None))
    return RankStores(stores, commands, send, MonotonicClock())


class RankStores:
    """Stores of one rank, which carry out the core's orders on a thread of their own.

    commands: queue of the thread. send: sends a message to the core, from any thread; raises
    CoreDisconnected. Any other error is reported to the core, which then ends the ranks: requests
    would wait for the missing answers."""

    def __init__(
        self,
        stores: OpenStores,
        commands: "SimpleQueue[Command]",
        send: Callable[[FromRank], None],
        clock: Clock,
    ) -> None:
        self._stores, self._commands, self._send, self._clock = stores, commands, send, clock
        self._thread = threading.Thread(target=self._run, name="quire-stores", daemon=True)
        self._thread.start()

    def put(self, command: StoreOrders | CloseStores) -> None:
        """Queue a message of the core."""
        self._commands.put(command)

    def _run(self) -> None:
        try:
            self._carry_out()
        except CoreDisconnected:
            logger.debug("the stores of this rank have stopped: the core has disconnected")
        except Exception as error:
            logger.error("the stores of this rank have failed", exc_info=error)
            with contextlib.suppress(CoreDisconnected):
                self._send(Failed("EngineError", f"stores: {type(error).__name__}: {error}"))

    def _carry_out(self) -> None:
        """Carry out orders until the core closes the stores."""
        while (command := self._next()) is None or isinstance(command, StoreOrders):
            if command is not None:
                self._stores.submit(command.orders)
            self._answer()
        self._stores.close(self._clock.now() + command.timeout_s, self._clock)
        self._answer()
        self._send(StoresClosed())

    def _next(self) -> Command:
        """Wait for the next command, or until an order is overdue."""
        due_s = self._stores.next_s
        wait_s = None if due_s is None else max(MIN_WAIT_S, due_s - self._clock.now())
        try:
            return self._commands.get(timeout=wait_s)
        except Empty:
            return None

    def _answer(self) -> None:
        found = self._stores.take(self._clock.now())
        if found:
            self._send(StoreAnswers(found))


class Link(Protocol):
    """Core's connection to all ranks (`ranks/executor.py`)."""

    def send_to_stores(self, message: StoreOrders | CloseStores) -> None:
        """Send a message to all ranks. Raises RankLost."""
        ...

    def check(self) -> None:
        """Raise RankLost if a rank was lost."""
        ...


class PartedStores:
    """Stores of a core with ranks, as `OpenStores`. ring: called when an answer has arrived."""

    def __init__(
        self, link: Link, num_ranks: int, num_stages: int, ring: Callable[[], None]
    ) -> None:
        self._link, self._ring = link, ring
        self._num_ranks, self._num_stages = num_ranks, num_stages
        self._parts: dict[tuple[int, int], list[Answer]] = {}  # by store and ticket
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._num_open = 0
        self._closed: SimpleQueue[None] = SimpleQueue()

    @property
    def num_open(self) -> int:
        """See Connections."""
        return self._num_open

    @property
    def has_answers(self) -> bool:
        """See Connections."""
        return not self._answers.empty()

    @property
    def next_s(self) -> float | None:
        """See Connections. The ranks end overdue orders."""
        return None

    def submit(self, orders: Sequence[Order]) -> None:
        """See Connections."""
        self._num_open += len(orders)
        self._link.send_to_stores(StoreOrders(list(orders)))

    def hear(self, message: StoreAnswers | StoresClosed) -> None:
        """Take a message of a rank, on the thread that reads them."""
        if isinstance(message, StoresClosed):
            self._closed.put(None)
            return
        is_new = False
        for answer in message.answers:
            parts = self._parts.setdefault((answer.store, answer.ticket), [])
            parts.append(answer)
            if len(parts) == self._num_ranks:
                del self._parts[answer.store, answer.ticket]
                self._answers.put(combine(parts, self._num_stages))
                is_new = True
        if is_new:
            self._ring()

    def take(self, now: float) -> list[Answer]:
        """See Connections. Raises RankLost: lost ranks answer no order."""
        self._link.check()
        found: list[Answer] = []
        try:
            while True:
                found.append(self._answers.get_nowait())
        except Empty:
            self._num_open -= len(found)
            return found

    def close(self, until_s: float, clock: Clock) -> None:
        """See Connections. Return early if the ranks are lost."""
        left_s = max(0.0, until_s - clock.now())
        end_s = time.monotonic() + left_s + CLOSING_S
        num_left = self._num_ranks
        try:
            self._link.send_to_stores(CloseStores(left_s))
            while num_left and time.monotonic() < end_s:
                self._link.check()
                try:
                    self._closed.get(timeout=LOOK_S)
                    num_left -= 1
                except Empty:
                    continue
        except RankLost:
            return


def combine(parts: Sequence[Answer], num_stages: int) -> Answer:
    """Return one answer of an order's answers by rank. A block is there if all its parts are.

    The duration gives the rate of one rank's parts. `block_bytes` of the scheduler covers the
    layers of all stages, and the heads of one rank."""
    first, replace = parts[0], msgspec.structs.replace
    ok = [all(each) for each in zip(*map(_found, parts), strict=True)]
    if isinstance(first, LookedUp):
        return replace(first, found=ok)
    if isinstance(first, Removed):
        return replace(first, ok=ok)
    num_bytes = sum(part.num_bytes for part in parts if not isinstance(part, LookedUp | Removed))
    seconds = sum(part.duration_s for part in parts if not isinstance(part, LookedUp | Removed))
    return replace(first, ok=ok, num_bytes=num_bytes, duration_s=seconds / num_stages)


def _found(answer: Answer) -> list[bool]:
    return answer.found if isinstance(answer, LookedUp) else answer.ok
