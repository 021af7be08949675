"""Which tokens of a step attend to each other in both directions: those of one whole item.

Shape legend: T tokens of a step. Frozen arrays: a device may carry the step out much later.
"""

from collections.abc import Sequence

import numpy as np

from quire.base.media.item import MediaItem
from quire.base.plan import Int32, Plan


def key_ends(items: Sequence[MediaItem], first: int, last: int) -> Int32:
    """Return the ends of what the tokens first..last-1 of a row see, [last - first], as
    `AttentionStep.ends_T` has them. items: of the row, those that are whole."""
    found = np.zeros(last - first, np.int32)
    for item in items:
        begin = max(item.start, first)
        if begin < min(item.end, last):
            assert item.end <= last, "a step computes the rest of a whole item, or none of it"
            found[begin - first : item.end - first] = item.end
    return found


class RowSpans:
    """The whole items of the rows that have any, on the host."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[MediaItem, ...]] = {}

    def follow(self, plan: Plan) -> None:
        """Note which rows a plan releases, starts and forks. A second time it changes nothing."""
        for row in plan.released.tolist():
            self._rows.pop(row, None)
        for start in plan.started:
            self._rows.pop(start.row, None)
            if items := tuple(item for item in start.media if item.is_whole):
                self._rows[start.row] = items
        for fork in plan.forked:
            self._rows.pop(fork.child, None)
            if fork.parent in self._rows:
                self._rows[fork.child] = self._rows[fork.parent]

    def of_step(self, plan: Plan) -> Int32 | None:
        """Return the ends of a step's tokens, [T]; None if all of them attend causally.

        `computed_bound` is exact up to the end of the prompt, and no item ends after it.
        """
        rows = plan.rows.tolist()
        if self._rows.keys().isdisjoint(rows):
            return None
        counts, firsts = plan.num_tokens.tolist(), plan.computed_bound.tolist()
        found = [
            key_ends(self._rows.get(row, ()), first, first + count)
            for row, count, first in zip(rows, counts, firsts, strict=True)
        ]
        ends_T = np.concatenate(found)
        return ends_T if ends_T.any() else None
