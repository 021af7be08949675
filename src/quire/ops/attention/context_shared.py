"""Attention over sequences whose tokens are divided among ranks (decode context parallelism).

C ranks have the same KV heads. The scheduler counts blocks of C * P tokens. Each rank stores P
tokens of such a block in its own block of the same number:

    tokens   0 .. P - 1   P .. 2 P - 1   |   2 P .. 3 P - 1   3 P .. 4 P - 1   |
    of       rank 0       rank 1         |   rank 0           rank 1           |   ...    (C = 2)
    in       block table[0] of each      |   block table[1] of each            |

In each layer a rank gathers the queries of all C ranks' heads and attends with them over its own
tokens. It sends each other rank the parts of that rank's heads, and the ranks merge their parts.
The number of a rank's tokens that a query sees does not grow by one from query to query. So each
token of a step is a row of its own for the inner backend: suited to decoding, slower for prompts.

Layers that do not need all tokens of a sequence (windows, states) are not divided. Each rank stores
their bounded memory in full, in a second backend.

Shape legend: as in `base.py`, and P tokens of a rank's block, C ranks, G = N / K query heads of a
KV head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from quire.base.errors import ConfigError
from quire.ops.attention.base import (
    AttentionBackend,
    ForwardingBackend,
    KVLayout,
    why_no_latents,
)
from quire.ops.attention_inputs import AttentionStep, Int32, Scores
from quire.ops.blocks.host_blocks import HostBlocks
from quire.ops.collective import RankGroup, all_gather, all_to_all
from quire.ops.host.host_memory import to_device
from quire.ops.registry import op
from quire.spec.cache_group import FULL, CacheGroup
from quire.spec.cuts import cut_block

MakeBackend = Callable[[KVLayout], AttentionBackend]


def share_context(layout: KVLayout, make: MakeBackend, ranks: RankGroup) -> AttentionBackend:
    """Make a backend for one of several ranks that divide each sequence's tokens among each other.
    Returns the backend of `make` if nothing would be divided. layout: with the scheduler's blocks.
    Raises ConfigError for blocks that cannot be divided."""
    if ranks.size == 1 or not any(map(_is_divided, layout.groups)):
        return make(layout)
    if why_no_latents(layout) is not None:
        raise ConfigError(
            "ranks cannot divide the tokens of a sequence with latent attention; remove"
            " decode_context_parallel_size."
        )
    return ContextShared(layout, make, ranks)


def _is_divided(group: CacheGroup) -> bool:
    return group.keeps_all and len(group.layers) > 0


@dataclass(frozen=True)
class TokenDivision:
    """Division of tokens among ranks: `rank` of `num` has `size` of each num * size tokens."""

    rank: int
    num: int
    size: int

    def before(self, positions: torch.Tensor) -> torch.Tensor:
        """Count the rank's tokens before each position. positions: integers of any shape [...]."""
        block = self.num * self.size
        rest = positions % block - self.rank * self.size
        return positions // block * self.size + rest.clamp(0, self.size)

    def slots(self, slots_T: torch.Tensor) -> torch.Tensor:
        """Return the rank's slot for each scheduler's slot, [T]; -1 for other ranks' tokens."""
        block = self.num * self.size
        offsets_T = slots_T % block - self.rank * self.size
        own_T = (slots_T >= 0) & (offsets_T >= 0) & (offsets_T < self.size)
        return (slots_T // block * self.size + offsets_T).masked_fill(~own_T, -1)


class ContextShared(ForwardingBackend):
    """Backend of one rank. make: builds the inner backends, which must support `run_part`."""

    def __init__(self, layout: KVLayout, make: MakeBackend, ranks: RankGroup) -> None:
        self._ranks = ranks
        size = cut_block(layout.block_size, ranks.size)
        self._division = TokenDivision(ranks.rank, ranks.size, size)
        self._is_divided = [_is_divided(group) for group in layout.groups]
        divided = [
            group if is_own else CacheGroup(FULL, ())
            for group, is_own in zip(layout.groups, self._is_divided, strict=True)
        ]
        self._divided = make(replace(layout, groups=tuple(divided), block_size=size))
        whole = [
            replace(group, layers=()) if is_own else group
            for group, is_own in zip(layout.groups, self._is_divided, strict=True)
        ]
        has_whole = any(group.layers for group in whole)
        self._whole = make(replace(layout, groups=tuple(whole))) if has_whole else None
        super().__init__(self._whole or self._divided)  # the one of layers with states
        self._group_of_layer = {
            layer: g for g, group in enumerate(divided) for layer in group.layers
        }
        self._num_kv_heads = [group.num_kv_heads for group in divided]
        self.name = self._divided.name
        self._accepts_slot_minus_one = self._divided.can_be_recorded  # slot -1 writes nothing
        self._own: dict[int, torch.Tensor] = {}  # the step's tokens that this rank stores, by group
        self._sees_none_T = torch.empty(0, dtype=torch.bool)

    @property
    def host_blocks(self) -> HostBlocks | None:
        """See AttentionBackend."""
        return self._divided.host_blocks if self._whole is None else None

    def prepare(self, step: AttentionStep) -> None:
        """Prepare the step for the divided layers, each token as a row, and for the others."""
        self._divided.prepare(self._own_step(step))
        if self._whole is not None:
            self._whole.prepare(step)

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Store the step's keys and values, [T, K, H] each, that belong to this rank."""
        group = self._group_of_layer.get(layer)
        if group is None:
            self._of_whole().write(layer, k_TKH, v_TKH)
        elif self._accepts_slot_minus_one:
            self._divided.write(layer, k_TKH, v_TKH)
        elif len(own := self._own[group]):
            self._divided.write(layer, k_TKH[own], v_TKH[own])

    def rotary_write(
        self,
        layer: int,
        qkv_TMH: torch.Tensor,
        num_kv_heads: int,
        rotary_rows: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """See AttentionBackend."""
        given = layer, qkv_TMH, num_kv_heads, rotary_rows, weight, eps
        if layer not in self._group_of_layer:
            return self._of_whole().rotary_write(*given)
        if self._accepts_slot_minus_one:
            return self._divided.rotary_write(*given)
        return AttentionBackend.rotary_write(self, *given)  # writes with this class's `write`

    def rotary_run(self, *given: Any) -> torch.Tensor:
        """See AttentionBackend."""
        return AttentionBackend.rotary_run(self, *given)

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend together with the other ranks, [T, N, H]."""
        group = self._group_of_layer.get(layer)
        if group is None:
            return self._of_whole().run(layer, q_TNH, scores, out_TNH)
        num_kv_heads = self._num_kv_heads[group]
        all_TNH = _side_by_side(all_gather(q_TNH, self._ranks), num_kv_heads)
        part = self._divided.run_part(layer, all_TNH, scores)
        out, log_sums = part.out_TNH, part.log_sums_TN
        out = out.masked_fill(self._sees_none_T[:, None, None], 0.0)
        log_sums = log_sums.masked_fill(self._sees_none_T[:, None], -torch.inf)
        both = torch.cat([out, log_sums[..., None]], dim=-1)
        parts_CTNX = all_to_all(_by_rank(both, num_kv_heads, self._ranks.size), self._ranks)
        merged_TNH = merge_parts(parts_CTNX[..., :-1], parts_CTNX[..., -1], scores.sinks_N)
        if out_TNH is None:
            return merged_TNH.to(q_TNH.dtype)
        return out_TNH.copy_(merged_TNH)

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy this rank's part of whole blocks within a group."""
        self._of_group(group).copy_blocks(group, source, destination)

    def swap_out(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy this rank's part of blocks to host memory."""
        self._of_group(group).swap_out(group, source, destination)

    def load(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy this rank's part of blocks of host memory back to the device."""
        self._of_group(group).load(group, source, destination)

    def _of_group(self, group: int) -> AttentionBackend:
        is_whole = self._whole is not None and not self._is_divided[group]
        return self._of_whole() if is_whole else self._divided

    def _of_whole(self) -> AttentionBackend:
        assert self._whole is not None, "all layers are divided"
        return self._whole

    def _own_step(self, step: AttentionStep) -> AttentionStep:
        """Return the step restricted to this rank's tokens. A query that sees none of them is given
        the first, and its result is discarded, so the inner backend needs no rows without keys."""
        num_tokens, starts_S1 = len(step.positions_T), step.query_starts_S1
        tokens_T1 = torch.arange(num_tokens + 1, dtype=torch.int32, device=starts_S1.device)
        tokens_T = tokens_T1[:-1]
        # After the last row there may be tokens of no row, at any position.
        ends_T = step.positions_T + 1
        if step.ends_T is not None:
            ends_T = torch.maximum(ends_T, to_device(step.ends_T, ends_T.device))
        seen_T = self._division.before(ends_T) * (tokens_T < starts_S1[-1])
        self._sees_none_T = seen_T == 0
        seen_T = seen_T.clamp(min=1)
        return replace(
            step,
            positions_T=seen_T - 1,
            query_starts_S1=tokens_T1,
            context_lens_S=seen_T.int(),
            slots_T=self._own_slots(step),
            block_tables_SL=self._tables(step, tokens_T),
            query_lens_host=np.ones(num_tokens, np.int32),
            context_lens_host=self._seen_at_most(step),
            has_drafts_S=None,
            ends_T=None,
        )

    def _own_slots(self, step: AttentionStep) -> tuple[torch.Tensor, ...]:
        """Return this rank's slots, [T] per group; the other groups' slots are unchanged. If the
        inner backend does not accept slot -1, only this rank's tokens are in the list."""
        slots = list(step.slots_T)
        for group in np.flatnonzero(self._is_divided).tolist():
            slots[group] = self._division.slots(slots[group])
            if not self._accepts_slot_minus_one:
                self._own[group] = own_T = (slots[group] >= 0).nonzero()[:, 0]
                slots[group] = slots[group][own_T]
        return tuple(slots)

    def _tables(self, step: AttentionStep, tokens_T: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return block tables [T, L], a row per token, for divided groups; others unchanged."""
        num_tokens, num_rows = len(step.positions_T), len(step.context_lens_S)
        if num_tokens == num_rows and np.all(step.query_lens_host == 1):
            return step.block_tables_SL
        ends_S = step.query_starts_S1[1:].contiguous()
        rows_T = torch.searchsorted(ends_S, tokens_T, right=True).clamp(max=num_rows - 1)
        return tuple(
            table_SL[rows_T] if is_own else table_SL
            for table_SL, is_own in zip(step.block_tables_SL, self._is_divided, strict=True)
        )

    def _seen_at_most(self, step: AttentionStep) -> Int32:
        """Return an upper bound, at least 1, of the rank's tokens that each query sees, [T]."""
        lens = step.query_lens_host.astype(np.int64)
        first = step.context_lens_host - lens
        within = np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens)
        ends = np.repeat(first, lens) + within + 1
        if step.ends_T is not None:
            ends = np.maximum(ends, step.ends_T)
        return self._division.before(torch.from_numpy(ends)).clamp(min=1).int().numpy()


def _side_by_side(q_CTNH: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Put the ranks' heads of each KV head next to each other, [T, C N, H]."""
    q_CTKGH = q_CTNH.unflatten(2, (num_kv_heads, -1))
    all_TNH: torch.Tensor = q_CTKGH.permute(1, 2, 0, 3, 4).flatten(1, 3)
    return all_TNH.contiguous()


def _by_rank(x_TNX: torch.Tensor, num_kv_heads: int, num_ranks: int) -> torch.Tensor:
    """Undo `_side_by_side`: return the heads of each rank, [C, T, N, X]."""
    x_TKCGX = x_TNX.unflatten(1, (num_kv_heads, num_ranks, -1))
    x_CTNX: torch.Tensor = x_TKCGX.permute(2, 0, 1, 3, 4).flatten(2, 3)
    return x_CTNX.contiguous()


@op("merge_parts")
def merge_parts(
    out_CTNH: torch.Tensor, log_sums_CTN: torch.Tensor, sinks_N: torch.Tensor | None
) -> torch.Tensor:
    """Merge C parts, one after the other, into attention over all keys, [T, N, H]. A part without
    keys has zeros as results, and -inf as the logarithm of its sum. sinks: as in Scores."""
    largest_TN = log_sums_CTN.amax(0)
    if sinks_N is not None:
        largest_TN = torch.maximum(largest_TN, sinks_N.to(largest_TN.dtype))
    weights_CTN = (log_sums_CTN - largest_TN).exp()
    total_TN, values_TNH = weights_CTN[0], out_CTNH[0] * weights_CTN[0, ..., None]
    for out_TNH, weights_TN in zip(out_CTNH[1:], weights_CTN[1:], strict=True):
        total_TN = total_TN + weights_TN
        values_TNH = values_TNH + out_TNH * weights_TN[..., None]
    if sinks_N is not None:
        total_TN = total_TN + (sinks_N.to(largest_TN.dtype) - largest_TN).exp()
    return values_TNH / total_TN[..., None]
