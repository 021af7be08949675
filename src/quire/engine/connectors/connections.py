"""An engine's stores as its core sees them: orders go out, answers come in, on its thread."""

from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from quire.base.clock import Clock
from quire.base.kv_orders import Answer, Order


class Worker(Protocol):
    """What carries out one store's orders (`worker.py`)."""

    def submit(self, order: Order) -> None: ...
    def expire(self, now: float) -> None: ...
    @property
    def next_s(self) -> float | None: ...
    def close(self, timeout_s: float) -> None: ...


class OpenStores(Protocol):
    """What a core asks of those who carry out the orders for its stores; `Connections` says what
    each is."""

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
    """The workers of all stores, by number. answers: where they put theirs, from any thread."""

    def __init__(self, workers: Sequence[Worker], answers: "SimpleQueue[Answer]") -> None:
        self._workers = list(workers)
        self._answers = answers
        self._num_open = 0

    @property
    def num_open(self) -> int:
        """Orders without an answer."""
        return self._num_open

    @property
    def has_answers(self) -> bool:
        return not self._answers.empty()

    @property
    def next_s(self) -> float | None:
        """When an answer is overdue, if none comes before; None is never."""
        times = [worker.next_s for worker in self._workers]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def submit(self, orders: Sequence[Order]) -> None:
        for order in orders:
            self._num_open += 1
            self._workers[order.store].submit(order)

    def take(self, now: float) -> list[Answer]:
        """Take the answers that are there."""
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
        """Let what is to be kept be kept, until then on this clock, and end."""
        for worker in self._workers:
            worker.close(max(0.0, until_s - clock.now()))
