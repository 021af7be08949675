"""Which tokens' log-probabilities rows asked for by name: `logprob_token_ids`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.base.plan import RowStart

Int64 = npt.NDArray[np.int64]


class NamedTokens:
    """The lists of a runner's rows."""

    def __init__(self) -> None:
        self._lists: dict[int, list[int]] = {}

    def start(self, start: RowStart) -> None:
        """Take the list of a row that a sequence takes, if it has one."""
        self.release(start.row)
        if start.params.logprob_token_ids:
            self._lists[start.row] = start.params.logprob_token_ids

    def release(self, row: int) -> None:
        """Forget a row's list."""
        self._lists.pop(row, None)

    def copy(self, parent: int, child: int) -> None:
        """Give a fork its parent's list."""
        self.release(child)
        if parent in self._lists:
            self._lists[child] = self._lists[parent]

    def has_any(self, rows: npt.NDArray[np.int32]) -> bool:
        """Tell whether one of these rows has a list."""
        return bool(self._lists) and bool(self.among(rows).any())

    def among(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Tell which of these rows have a list."""
        if not self._lists:
            return np.zeros(len(rows), bool)
        return np.isin(rows, list(self._lists))

    def table(self, rows: npt.NDArray[np.int32]) -> tuple[Int64, Int64]:
        """Return the lists of rows that have one: how long each is, and [rows, longest] ids, padded
        with 0."""
        return padded([self._lists[row] for row in rows.tolist()])


def padded(lists: Sequence[Sequence[int]]) -> tuple[Int64, Int64]:
    """Return how long each list is, and all of them, [lists, longest], padded with 0."""
    counts = np.array([len(ids) for ids in lists], np.int64)
    ids = np.zeros((len(lists), int(counts.max())), np.int64)
    for place, each in enumerate(lists):
        ids[place, : len(each)] = each
    return counts, ids
