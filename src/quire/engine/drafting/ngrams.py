"""Guesses from a sequence's own tokens: what followed the last time that they ended like this.

"Prompt lookup": of the last n tokens, for n from the most to the fewest that is asked for, the
newest place before where they stand already; what follows there is the guess. Where that is the
sequence's own end, it repeats itself, and so does the guess. Nothing is kept: all sequences of a
step are searched in one call.
"""

import numpy as np
import numpy.typing as npt

from quire.ops.find_runs import SEARCHED, find_runs
from quire.scheduler.core.sequence import RowTable


class NGrams:
    """fewest, most: tokens of the run."""

    def __init__(self, fewest: int, most: int) -> None:
        self._fewest, self._most = fewest, most

    def places(self, table: RowTable, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Find [N] where the last tokens of these rows stood before: the place behind them; -1 if
        they are new."""
        bounds = self._fewest, self._most, SEARCHED
        return find_runs(table.tokens, rows, table.known[rows], *bounds)


def repeated(tokens: npt.NDArray[np.int32], place: int, num: int) -> list[int]:
    """Return `num` tokens that may come next if they go on as behind a place."""
    followed: list[int] = tokens[place : place + num].tolist()
    while len(followed) < num:
        followed += followed[: num - len(followed)]
    return followed
