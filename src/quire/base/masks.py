"""Masks of the tokens that a step's rows may choose, computed by other threads during the step."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from quire.base.plan import Int32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of one plan, by row and position.

    Position 0 follows a row's last known token; position i follows its i-th draft token. The number
    of positions is that of the row with the most draft tokens. A mask without any allowed token
    ends the acceptance of draft tokens, without an error. A row has such a mask at positions after
    its draft tokens, after a draft token that the grammar rejects, and after a dead end.
    """

    rows: Int32  # [M] the plan's masked_rows
    # [M, positions, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 allows token t
    words: Int32
    errors: dict[int, str] = field(default_factory=dict)  # by row, if its grammar cannot continue

    def of(self, rows: Int32) -> Int32:
        """Return the words of these rows in this order, [len(rows), positions, W]."""
        order = np.argsort(self.rows, kind="stable")
        return self.words[order[np.searchsorted(self.rows, rows, sorter=order)]]


class MaskPromise:
    """The future masks of one plan. One thread puts them once. The sampling thread waits for them,
    several times if the plan is repeated in parts."""

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
        """Call the listener with the masks: now if they are there, else on the thread that puts
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
        """Wait for the masks and return them."""
        self._is_there.wait()
        assert self._masks is not None
        return self._masks
