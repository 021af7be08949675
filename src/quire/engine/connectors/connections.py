"""An engine's stores for its core: orders go out and answers come in, on the core's thread."""

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from quire.base.clock import Clock
from quire.base.kv_orders import Answer, Order


class Worker(Protocol):
    """Worker that carries out one store's orders (`worker.py`)."""

    def submit(self, order: Order) -> None: ...
    def expire(self, now: float) -> None: ...
    @property
    def next_s(self) -> float | None: ...
    def close(self, timeout_s: float) -> None: ...


class OpenStores(Protocol):
    """Interface of all stores of a core. `Connections` documents its members."""

    @property
    def num_open(self) -> int: ...

    @property
    def has_answers(self) -> bool: ...

    @property
    def next_s(self) -> float | None: ...

    def submit(self, orders: Sequence[Order]) -> None: ...

    def take(self, now: float) -> list[Answer]: ...

    def close(self, until_s: float, clock: Clock) -> None: ...


class Connections:
    """Workers of all stores, by number. answers: queue for their answers, from any thread."""

    def __init__(self, workers: Sequence[Worker], answers: "SimpleQueue[Answer]") -> None:
        self._workers = list(workers)
        self._answers = answers
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Number of orders without an answer."""
        return self._num_open

    @property
    def has_answers(self) -> bool:
        return not self._answers.empty()

    @property
    def next_s(self) -> float | None:
        """Time at which an answer is overdue, unless one arrives before; None is never."""
        times = [worker.next_s for worker in self._workers]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def submit(self, orders: Sequence[Order]) -> None:
        for order in orders:
            self._num_open += 1
            self._workers[order.store].submit(order)

    def take(self, now: float) -> list[Answer]:
        """Return the answers that have arrived, after overdue orders are answered with misses."""
        due_s = self.next_s if self._num_open else None
        if due_s is not None and due_s <= now:
            for worker in self._workers:
                worker.expire(now)
        found: list[Answer] = []
        try:
            while True:
                found.append(self._answers.get_nowait())
        except Empty:
            self._num_open -= len(found)
            return found

    def close(self, until_s: float, clock: Clock) -> None:
        """Let waiting blocks be stored until `until_s`, by this clock, and close all stores."""
        for worker in self._workers:
            worker.close(max(0.0, until_s - clock.now()))
