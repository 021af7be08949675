"""Plans in flight, as the core knows them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.masks import MaskPromise
from quire.base.plan import Plan

Sampling = npt.NDArray[np.object_]
NOBODY: Sampling = np.empty(0, object)


@dataclass(slots=True)
class Submitted:
    """A plan in flight. sampling: the sequences of its sample_rows. carried_out: as the executor
    got it, without rows that had been left out and with what a plan before it was to do;
    num_tokens: of that; masks: of its masked rows. left_out: rows whose results are void."""

    plan: Plan
    sampling: Sampling
    carried_out: Plan
    num_tokens: int
    masks: MaskPromise | None
    left_out: frozenset[int] = frozenset()

    @property
    def has_run(self) -> bool:
        """Whether the executor got it: it has rows, or moves blocks, or was made to."""
        has_work = len(self.carried_out.rows) > 0 or len(self.carried_out.moves) > 0
        return has_work or len(self.plan.rows) == 0
