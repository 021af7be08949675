"""Inputs of attention and of delta rules, shared by all backends and kernels.

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
    """Parameters that turn a layer's products of queries and keys into weights:

        score[j] = scale q . k[j], with a soft cap cap * tanh(scale q . k[j] / cap)
        weight[j] = e^score[j] / (e^sink + sum over seen j of e^score[j])

    sinks_N: one logit per query head, float32 (float64 for float64 queries). If None, e^sink is 0.
    The step and the cache group's window decide which keys j a query sees.
    """

    scale: float
    soft_cap: float | None = None
    sinks_N: torch.Tensor | None = None


class DeltaHeads(NamedTuple):
    """Head counts and head sizes of a delta rule. keys: heads of queries, and equally many heads of
    keys, of `key_dim` numbers each. values: heads of values of `value_dim` numbers each, a multiple
    of `keys`; consecutive value heads share a key head."""

    keys: int
    values: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Numbers per token in the concatenated queries, keys and values."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    @property
    def memory_size(self) -> int:
        """Numbers in the memories of all value heads of one sequence."""
        return self.values * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Metadata of one step for attention, with one block table and one slot array per cache group.

    positions_T, slots_T (block_id * P + offset): int64. query_starts_S1: int32 prefix sums, from 0
    to the total. context_lens_S: int32. block_tables_SL: int32. Table entries beyond the context,
    and of blocks that left the window, are -1 or any valid block id; they must not change the
    result.
    query_lens_host, context_lens_host: upper bounds of the lengths on the device (exact while no
    drafts are in flight).
    has_drafts_S: bool, rows whose last tokens are draft tokens; their states are not stored
    (states.py).
    groups: cache groups whose layers run, None for all. Blocks of the other groups are unchanged.
    ends_T: position after the last key seen by a token that attends in both directions, at most its
    row's context length; 0 for other tokens. Within a row no token sees less far than an earlier
    one. The host has the exact values. None: no token attends in both directions.
    is_uncut: whether no row's keys may be cut, so that a backend has no parts to merge. Results are
    right either way.
    is_separate: whether each row has at most one token, and none reads a block that another row of
    the step writes. So a backend may store a row's key in the launch that reads all others.
    """

    positions_T: torch.Tensor
    query_starts_S1: torch.Tensor
    context_lens_S: torch.Tensor
    slots_T: tuple[torch.Tensor, ...]
    block_tables_SL: tuple[torch.Tensor, ...]
    query_lens_host: Int32
    context_lens_host: Int32
    has_drafts_S: torch.Tensor | None = None
    groups: range | None = None
    ends_T: Int32 | None = None
    is_uncut: bool = False
    is_separate: bool = False

    def has(self, group: int) -> bool:
        """Return whether the layers of a cache group run in this step."""
        return self.groups is None or group in self.groups
