"""Attention by plain loops, in any dtype and on any device; the reference for tests of the others.

Shape legend: as in `base.py`, and Q tokens of one row. A layer's keys and values are
[2, B, P, K, H], and its latent vectors [1, B, P, 1, L].

Equation 4 of P 4.1: blocks of a row are read one after the other. A running maximum and a running
sum of the softmax make one pass over the blocks enough.
"""

from collections.abc import Iterator

import torch

from quire.ops.attention.base import Expand, KVLayout, Part, first_seen, refuse_kv_format
from quire.ops.attention.states import StateLayers, StateRow, state_rows
from quire.ops.attention_inputs import AttentionStep, Int32, Scores
from quire.ops.blocks.host_blocks import HostBlocks
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op
from quire.spec.cache_group import STATE, CacheGroup


class ReferenceBackend(StateLayers):
    """Backend that is simple enough to be obviously right. It reads lengths and tables from the
    device, so it waits for it."""

    name = "reference"

    def __init__(self, layout: KVLayout) -> None:
        refuse_kv_format(self.name, layout)
        self._layout = layout
        self._group_of_layer = layout.group_of_layer()
        self._kv = {
            layer: _memory(group, num_blocks, layout)
            for group, num_blocks in zip(layout.groups, layout.num_blocks, strict=True)
            for layer in group.layers
        }
        self._layers = list(self._kv)
        host = layout.num_host_blocks or layout.num_blocks
        num_host_blocks = [host[self._group_of_layer[layer]] for layer in self._layers]
        kv = [self._kv[layer] for layer in self._layers]
        self._host = HostBlocks(kv, dim=1, num_blocks=num_host_blocks)
        self._step: AttentionStep | None = None

    def prepare(self, step: AttentionStep) -> None:
        """Store the step."""
        self._step = step

    def states(self, layer: int) -> torch.Tensor:
        """See StateLayers."""
        return self._kv[layer][0, :, 0, 0]

    def state_rows(self, layer: int) -> list[StateRow]:
        """See StateLayers."""
        assert self._step is not None, "prepare() comes first"
        table_SL = self._step.block_tables_SL[self._group_of_layer[layer]]
        return list(state_rows(self._step, table_SL, self._layout.block_size))

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Store the step's keys and values, [T, K, H] each, in their slots."""
        self._store(layer, torch.stack([k_TKH, v_TKH]))

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend row by row, [T, N, H]."""
        if out_TNH is None:
            out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for tokens, softmax in self._softmaxes(layer, q_TNH, scores):
            out_TNH[tokens] = softmax.result().to(q_TNH.dtype)
        return out_TNH

    def run_part(self, layer: int, q_TNH: torch.Tensor, scores: Scores) -> Part:
        """See AttentionBackend."""
        out_TNH = q_TNH.new_empty(q_TNH.shape, dtype=accumulation_dtype(q_TNH.dtype))
        log_sums_TN = out_TNH.new_empty(out_TNH.shape[:2])
        for tokens, softmax in self._softmaxes(layer, q_TNH, Scores(scores.scale, scores.soft_cap)):
            out_TNH[tokens] = softmax.result()
            log_sums_TN[tokens] = softmax.log_sums()
        return Part(out_TNH, log_sums_TN)

    @op("latent_write")
    def write_latent(self, layer: int, latent_TL: torch.Tensor) -> None:
        """See AttentionBackend."""
        self._store(layer, latent_TL[None, :, None])

    @op("latent_attention")
    def run_latent(
        self, layer: int, q_TNL: torch.Tensor, scores: Scores, num_values: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        out_TNV = q_TNL.new_empty(*q_TNL.shape[:2], num_values)
        for tokens, softmax in self._softmaxes(layer, q_TNL, scores):
            out_TNV[tokens] = softmax.result()[..., :num_values].to(q_TNL.dtype)
        return out_TNV

    @op("expanded_attention")
    def run_expanded(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, expand: Expand, num_values: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        out_TNV = q_TNH.new_empty(*q_TNH.shape[:2], num_values)
        for tokens, softmax in self._softmaxes(layer, q_TNH, scores, expand):
            out_TNV[tokens] = softmax.result().to(q_TNH.dtype)
        return out_TNV

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy whole blocks in all layers of the group."""
        for layer in self._layout.groups[group].layers:
            kv = self._kv[layer]
            kv[:, destination.tolist()] = kv[:, source.tolist()]

    def swap_out(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy device blocks of a group to blocks of host memory, layer by layer."""
        for layer in self._layout.groups[group].layers:
            self._host.swap_out(self._layers.index(layer), source, destination)

    def load(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy blocks of host memory to device blocks of a group, layer by layer."""
        for layer in self._layout.groups[group].layers:
            self._host.load(self._layers.index(layer), source, destination)

    def _store(self, layer: int, vectors_VTKH: torch.Tensor) -> None:
        """Store keys and values, or latent vectors, in the step's slots."""
        assert self._step is not None, "prepare() comes before write()"
        slots_T = self._step.slots_T[self._group_of_layer[layer]]
        blocks_T, offsets_T = slots_T // self._layout.block_size, slots_T % self._layout.block_size
        self._kv[layer][:, blocks_T, offsets_T] = vectors_VTKH

    def _softmaxes(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, expand: Expand | None = None
    ) -> Iterator[tuple[slice, "OnlineSoftmax"]]:
        """Yield the tokens of each row, and their softmax over all keys that they see. expand:
        makes keys and values of stored latent vectors; None for the stored ones."""
        assert self._step is not None, "prepare() comes before run()"
        group = self._group_of_layer[layer]
        starts = self._step.query_starts_S1.tolist()
        tables = self._step.block_tables_SL[group].tolist()
        for row, context_len in enumerate(self._step.context_lens_S.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            softmax = OnlineSoftmax(q_TNH[tokens], scores)
            self._add_row(softmax, layer, context_len, tables[row], tokens, expand)
            yield tokens, softmax

    def _add_row(
        self,
        softmax: "OnlineSoftmax",
        layer: int,
        context_len: int,
        table: list[int],
        tokens: slice,
        expand: Expand | None,
    ) -> None:
        """Add one row's keys and values, block by block, to the softmax of its Q newest tokens."""
        assert self._step is not None, "prepare() comes before run()"
        block_size = self._layout.block_size
        group = self._layout.groups[self._group_of_layer[layer]]
        first_query = context_len - softmax.num_queries
        first_key = group.first_needed(first_query)
        device = self._layout.device
        query_Q1 = torch.arange(first_query, context_len, device=device)[:, None]
        first_Q1, last_Q1 = first_seen(group, query_Q1), query_Q1
        if self._step.ends_T is not None:
            ends_Q = torch.from_numpy(self._step.ends_T[tokens])
            last_Q1 = torch.maximum(query_Q1, ends_Q.to(device)[:, None] - 1)
        for index in range(first_key // block_size, (context_len - 1) // block_size + 1):
            start = index * block_size
            length = min(block_size, context_len - start)
            key_P = torch.arange(start, start + length, device=device)
            allowed_QP = key_P <= last_Q1
            if first_Q1 is not None:
                allowed_QP &= key_P >= first_Q1
            vectors_VPKH = self._kv[layer][:, table[index], :length]
            k_PKH, v_PKH = vectors_VPKH[0], vectors_VPKH[-1]
            if expand is not None:
                k_PKH, v_PKH = expand(k_PKH[:, 0])
            softmax.add(k_PKH, v_PKH, allowed_QP)


def _memory(group: CacheGroup, num_blocks: int, layout: KVLayout) -> torch.Tensor:
    """Allocate a layer's memory: [2, B, P, K, H] for keys and values. Latent vectors need
    [1, B, P, 1, L], and states [1, B, 1, 1, size]."""
    if group.kind == STATE:
        shape = (1, num_blocks, 1, 1, group.state_size)
        return lazy_zeros(shape, accumulation_dtype(layout.dtype), layout.device)
    shape = (group.vectors, num_blocks, layout.block_size, group.num_kv_heads, group.head_dim)
    return lazy_zeros(shape, layout.dtype, layout.device)


class OnlineSoftmax:
    """Softmax-weighted sum of values for Q queries, over keys and values that arrive in pieces.
    State per query and head: the largest score so far and, relative to it, the sum of the
    exponentials and the weighted sum of values. A sink counts as the first score."""

    def __init__(self, q_QNH: torch.Tensor, scores: Scores) -> None:
        self._dtype = accumulation_dtype(q_QNH.dtype)
        self._soft_cap = scores.soft_cap
        self._q_NQH = q_QNH.to(self._dtype).transpose(0, 1) * scores.scale
        self._max_NQ1 = self._q_NQH.new_full((*self._q_NQH.shape[:2], 1), -torch.inf)
        self._sum_NQ1 = torch.zeros_like(self._max_NQ1)
        if scores.sinks_N is not None:
            self._max_NQ1.copy_(scores.sinks_N[:, None, None])
            self._sum_NQ1.fill_(1.0)
        self._values_NQV: torch.Tensor | None = None

    @property
    def num_queries(self) -> int:
        return self._q_NQH.shape[1]

    def add(self, k_PKH: torch.Tensor, v_PKH: torch.Tensor, allowed_QP: torch.Tensor) -> None:
        """Add P more keys and values, [P, K, H]. allowed [Q, P]: which query sees which key."""
        k_NPH, v_NPH = self._per_query_head(k_PKH), self._per_query_head(v_PKH)
        scores_NQP = self._q_NQH @ k_NPH.transpose(1, 2)
        if self._soft_cap is not None:
            scores_NQP = self._soft_cap * torch.tanh(scores_NQP / self._soft_cap)
        scores_NQP = scores_NQP.masked_fill(~allowed_QP, -torch.inf)
        new_max_NQ1 = torch.maximum(self._max_NQ1, scores_NQP.amax(dim=-1, keepdim=True))
        # A query that has seen no key yet has the maximum -inf; 0 keeps its exponentials at 0.
        base_NQ1 = new_max_NQ1.masked_fill(new_max_NQ1 == -torch.inf, 0.0)
        weights_NQP = torch.exp(scores_NQP - base_NQ1)
        correction_NQ1 = torch.exp(self._max_NQ1 - base_NQ1)
        self._sum_NQ1 = self._sum_NQ1 * correction_NQ1 + weights_NQP.sum(dim=-1, keepdim=True)
        values_NQV = weights_NQP @ v_NPH
        if self._values_NQV is not None:
            values_NQV += self._values_NQV * correction_NQ1
        self._values_NQV = values_NQV
        self._max_NQ1 = new_max_NQ1

    def result(self) -> torch.Tensor:
        """Return the weighted means of the values, [Q, N, H]."""
        assert self._values_NQV is not None, "a query sees at least its own key"
        return (self._values_NQV / self._sum_NQ1).transpose(0, 1)

    def log_sums(self) -> torch.Tensor:
        """Return the logarithms of the sums of all e^score, [Q, N]."""
        return (self._max_NQ1 + self._sum_NQ1.log())[..., 0].T

    def _per_query_head(self, x_PKH: torch.Tensor) -> torch.Tensor:
        """Return [N, P, H]: each of the K heads serves N / K consecutive query heads."""
        num_queries_per_kv = self._q_NQH.shape[0] // x_PKH.shape[1]
        x_KPH = x_PKH.to(self._dtype).transpose(0, 1)
        return x_KPH.repeat_interleave(num_queries_per_kv, dim=0)
