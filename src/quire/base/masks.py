"""Which tokens a step's rows may choose, made on other threads while the step runs."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.base.plan import Int32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """rows: [M], a plan's masked_rows. words: [M, positions, ceil(vocabulary / 32)]: bit t % 32 of
    word t // 32 says that token t may be chosen at this position; a row of ones allows everything.
    errors: of rows whose grammar cannot go on, what the matter is; nothing is allowed there.

    Position 0 is behind a row's last known token, position i behind its i-th guess; there are as
    many as the row with most guesses has. Where a row has no such guess, cannot have sampled it, or
    its grammar cannot go on, nothing is allowed: its guesses end there, and it has no error.

    A mask is found by its row and position, never by its place in a step's lists.
    """

    rows: Int32
    words: Int32
    errors: dict[int, str] = field(default_factory=dict)

    def of(self, rows: Int32) -> Int32:
        """Return the words of these of the rows, in their order, [M, positions, W]."""
        order = np.argsort(self.rows, kind="stable")
        return self.words[order[np.searchsorted(self.rows, rows, sorter=order)]]


class MaskPromise:
    """The masks of one plan. Put once, by the thread that makes them; waited for by the one that
    samples, also several times if the plan is repeated in parts."""

    def __init__(self) -> None:
        self._is_there = threading.Event()
        self._masks: TokenMasks | None = None
        self._lock = threading.Lock()
        self._listeners: list[Callable[[TokenMasks], None]] = []

    def put(self, masks: TokenMasks) -> None:
        with self._lock:
            self._masks = masks
            self._is_there.set()
        for listener in self._listeners:
            listener(masks)

    def then(self, listener: Callable[[TokenMasks], None]) -> None:
        """Call this with the masks: now, if they are there, or else on the thread that puts
        them."""
        with self._lock:
            masks = self._masks
            if masks is None:
                self._listeners.append(listener)
        if masks is not None:
            listener(masks)

    @property
    def is_there(self) -> bool:
        return self._is_there.is_set()

    def wait(self) -> TokenMasks:
        """Return the masks, when they are there."""
        self._is_there.wait()
        assert self._masks is not None
        return self._masks
