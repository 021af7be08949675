"""What attention and delta rules are given, for backends and kernels alike.

Shape legend: T tokens of the step, S scheduled rows, N query heads, P tokens per block, L longest
block table of the step.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)
class Scores:
    """How a layer's products of queries and keys become weights:

        score[j] = scale q . k[j], with a soft cap cap * tanh(scale q . k[j] / cap)
        weight[j] = e^score[j] / (e^sink + sum over seen j of e^score[j])

    sinks_N: one logit per query head, float32 (float64 for float64 queries); without them e^sink is
    0. Which keys are seen depends on the step and on the cache group's window.
    """

    scale: float
    soft_cap: float | None = None
    sinks_N: torch.Tensor | None = None


class DeltaHeads(NamedTuple):
    """What a delta rule works on: `keys` heads of queries and of keys of `key_dim` numbers, each
    for as many of the `values` heads of values of `value_dim`, a multiple."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Numbers of queries, keys and values side by side."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    @property
    def memory_size(self) -> int:
        return self.values * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """One step, as attention sees it. One block table and one slot array per cache group.

    positions_T, slots_T (block_id * P + offset): int64. query_starts_S1: int32, exclusive prefix
    sum with the total at the end. block_tables_SL: int32; entries beyond the context, and entries
    of blocks that left the window, are arbitrary valid block ids or -1 and must not change the
    result.
    The host arrays are upper bounds of what the device holds (exact while no drafts are in flight).
    guessing_S: bool, rows that leave no states: their last tokens are guesses (states.py).
    groups: those whose layers run, if not all; the blocks of others are left as they are.
    ends_T: of tokens that attend in both directions, the position after the last key that each
    sees, at most its row's context length; 0 for other tokens. None: the step has only those.
    Tokens of a row see no less far than those before them. On the host, which knows it exactly.
    """

    positions_T: torch.Tensor
    query_starts_S1: torch.Tensor
    context_lens_S: torch.Tensor
    slots_T: tuple[torch.Tensor, ...]
    block_tables_SL: tuple[torch.Tensor, ...]
    query_lens_host: Int32
    context_lens_host: Int32
    guessing_S: torch.Tensor | None = None
    groups: range | None = None
    ends_T: Int32 | None = None

    def has(self, group: int) -> bool:
        """Tell whether the step is for layers of a cache group."""
        return self.groups is None or group in self.groups
