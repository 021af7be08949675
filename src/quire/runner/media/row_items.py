"""What a runner keeps for each row with media items, on the host."""

from typing import Generic, TypeVar

from quire.base.media.item import MediaItem
from quire.base.plan import Plan

Kept = TypeVar("Kept")


class RowItems(Generic[Kept]):
    """Follows the rows that have media items. A subclass makes what it keeps of a row's items."""

    def __init__(self) -> None:
        self._rows: dict[int, Kept] = {}

    def made_of(self, items: tuple[MediaItem, ...]) -> Kept | None:
        """Return what to keep for a row with these items, of which there is at least one."""
        raise NotImplementedError

    def follow(self, plan: Plan) -> None:
        """Note which rows a plan releases, starts and forks. A second time it changes nothing."""
        if self._rows:
            for row in [*plan.released.tolist(), *(start.row for start in plan.started)]:
                self._rows.pop(row, None)
        for start in plan.started:
            if start.media and (kept := self.made_of(start.media)) is not None:
                self._rows[start.row] = kept
        for fork in plan.forked if self._rows else ():
            self._rows.pop(fork.child, None)
            if fork.parent in self._rows:
                self._rows[fork.child] = self._rows[fork.parent]

    def are_in(self, plan: Plan) -> bool:
        """Return whether a plan computes tokens of such rows."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(plan.rows.tolist())
