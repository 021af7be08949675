"""The media items of rows, on the host. Tokens of a whole item attend to each other in both
directions; this file finds them in each step.

Shape legend: T tokens of a step. Arrays are frozen, because a device may run the step much later.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from quire.base.plan import Int32, Plan
from quire.base.requests.media_items import MediaItem

Stored = TypeVar("Stored")


class RowItems(Generic[Stored]):
    """Data of the rows that have media items. A subclass computes the data from a row's items."""

    def __init__(self) -> None:
        self._rows: dict[int, Stored] = {}

    def data_of(self, items: tuple[MediaItem, ...]) -> Stored | None:
        """Return the data of a row with these items, at least one; None: nothing to store."""
        raise NotImplementedError

    def follow(self, plan: Plan) -> None:
        """Note which rows a plan releases, starts and forks. Repeated calls with one plan change
        nothing."""
        if self._rows:
            for row in [*plan.released.tolist(), *(start.row for start in plan.started)]:
                self._rows.pop(row, None)
        for start in plan.started:
            if start.media and (stored := self.data_of(start.media)) is not None:
                self._rows[start.row] = stored
        for fork in plan.forked if self._rows else ():
            self._rows.pop(fork.child, None)
            if fork.parent in self._rows:
                self._rows[fork.child] = self._rows[fork.parent]

    def are_in(self, plan: Plan) -> bool:
        """Return whether a plan computes tokens of rows that have items."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(plan.rows.tolist())


def key_ends(items: Sequence[MediaItem], first: int, last: int) -> Int32:
    """Return the end of the visible keys of tokens first..last-1 of a row, int32 [last - first].
    Its format is `AttentionStep.ends_T`. items: the row's items that are whole."""
    found = np.zeros(last - first, np.int32)
    for item in items:
        begin = max(item.start, first)
        if begin < min(item.end, last):
            assert item.end <= last, "a step computes the rest of a whole item, or none of it"
            found[begin - first : item.end - first] = item.end
    return found


class RowSpans(RowItems[tuple[MediaItem, ...]]):
    """Whole items of the rows that have any."""

    def data_of(self, items: tuple[MediaItem, ...]) -> tuple[MediaItem, ...] | None:
        """See RowItems."""
        return tuple(item for item in items if item.is_whole) or None

    def of_step(self, plan: Plan) -> Int32 | None:
        """Return the ends of a step's tokens, [T]; None if all of them attend causally.

        `computed_bound` is exact up to the end of the prompt, and no item ends after it.
        """
        if not self.are_in(plan):
            return None
        counts, firsts = plan.num_tokens.tolist(), plan.computed_bound.tolist()
        found = [
            key_ends(self._rows.get(row, ()), first, first + count)
            for row, count, first in zip(plan.rows.tolist(), counts, firsts, strict=True)
        ]
        ends_T = np.concatenate(found)
        return ends_T if ends_T.any() else None
