"""Attention with torch operations, on any device; its sizes are tuned for a CPU's caches.

Shape legend as in `base.py`, and: Y layers of a group, R rows of a batch, Q new tokens per row,
G query heads of one KV head (N = K G), C context tokens per row (whole blocks).

Keys and values of a group stand as [2, Y, K, B, P, H]. Taking blocks along B so gives each head's
tokens in order, with no transposition. `prepare` sorts a step's rows into batches of rows that have
equally many new tokens and about equally long contexts; per layer each batch is

    gather blocks  ->  scores q k^T + bias  ->  softmax  ->  weights times v

with so few keys and values that they stay in the cache between these.
"""

import math
from collections.abc import Iterator

import torch

from quire.base.cache_group import STATE
from quire.ops.attention.base import KVLayout, Part, refuse_kv_format
from quire.ops.attention.batches import Batch, BatchBuilder
from quire.ops.attention.kv_memory import KVMemory
from quire.ops.attention.states import StatesInBlocks
from quire.ops.attention.weigh import weigh, weigh_part
from quire.ops.attention_inputs import AttentionStep, Scores
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op


class TorchBackend(StatesInBlocks):
    """Gathers blocks, then multiplies."""

    name = "torch"

    def __init__(self, layout: KVLayout) -> None:
        refuse_kv_format(self.name, layout)
        # The memory begins as zeros: tokens that a row does not see yet are weighted with 0, and
        # 0 * NaN would be NaN.
        self._memory = KVMemory(layout)
        self._kv = self._memory.kv
        self._place_of_layer = self._memory.place
        self._builders = [
            BatchBuilder(group, layout) if group.kind != STATE and group.layers else None
            for group in layout.groups
        ]
        self._batches: list[list[Batch]] = []
        self._layout = layout
        self._slots_T: tuple[torch.Tensor, ...] = ()
        self._scratch = torch.empty(0, dtype=layout.dtype, device=layout.device)

    def prepare(self, step: AttentionStep) -> None:
        """Make the index tensors and masks that all layers share."""
        self._step, self._slots_T = step, step.slots_T
        self._batches = [[] for _ in self._builders]
        for g, (builder, table_SL) in enumerate(
            zip(self._builders, step.block_tables_SL, strict=True)
        ):
            if builder is None or not step.has(g):
                continue
            self._batches[g] = builder.build(step, table_SL)
            begun = builder.begun_blocks(step, table_SL)
            if begun is not None:
                # What an earlier owner left behind could be NaN.
                self._kv[g].index_fill_(3, begun, 0.0)

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Store this step's keys and values in their slots."""
        g, index = self._place_of_layer[layer]
        slots_T = self._slots_T[g]
        kv = self._kv[g][:, index].flatten(2, 3)
        kv[0].index_copy_(1, slots_T, k_TKH.transpose(0, 1))
        kv[1].index_copy_(1, slots_T, v_TKH.transpose(0, 1))

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend batch by batch, [T, N, H]."""
        if out_TNH is None:
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        g, index = self._place_of_layer[layer]
        kv = self._kv[g][:, index]
        for batch in self._batches[g]:
            k_KRCH, v_KRCH = self._gather(kv, batch)
            _attend(batch, q_TNH, k_KRCH, v_KRCH, scores, out_TNH)
        return out_TNH

    def run_part(self, layer: int, q_TNH: torch.Tensor, scores: Scores) -> Part:
        """See AttentionBackend."""
        out_TNH = q_TNH.new_empty(q_TNH.shape, dtype=accumulation_dtype(q_TNH.dtype))
        part = Part(out_TNH, out_TNH.new_empty(out_TNH.shape[:2]))
        g, index = self._place_of_layer[layer]
        kv = self._kv[g][:, index]
        for batch in self._batches[g]:
            k_KRCH, v_KRCH = self._gather(kv, batch)
            _attend_part(batch, q_TNH, k_KRCH, v_KRCH, scores, part)
        return part

    def _gather(self, kv: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a batch, [K, R, C, H] each, in memory that the next batch
        reuses.

        Fresh memory for each gather would cost more than the gather: its pages must be mapped.
        """
        _, heads, _, block_size, size = kv.shape
        shape = (2, heads, batch.blocks.numel(), block_size, size)
        count = math.prod(shape)
        if self._scratch.numel() < count:
            self._scratch = self._scratch.new_empty(count)
        gathered = self._scratch[:count].view(shape)
        torch.index_select(kv, 2, batch.blocks, out=gathered)
        k_KRCH, v_KRCH = gathered.view(2, heads, batch.num_rows, -1, size)
        return k_KRCH, v_KRCH


def _attend(
    batch: Batch,
    q_TNH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    scores: Scores,
    out_TNH: torch.Tensor,
) -> None:
    """Write the attention of the batch's tokens to `out`."""
    spans = [weigh(*given, scores) for given in _spans(batch, q_TNH, k_KRCH, v_KRCH)]
    out_RQKGH = spans[0] if len(spans) == 1 else torch.cat(spans, dim=1)
    out_TNH[batch.tokens] = out_RQKGH.reshape(-1, *q_TNH.shape[1:])


def _attend_part(
    batch: Batch,
    q_TNH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    scores: Scores,
    part: Part,
) -> None:
    """Write what the batch's tokens take to their places of a part."""
    found = [weigh_part(*given, scores) for given in _spans(batch, q_TNH, k_KRCH, v_KRCH)]
    for to, spans in zip(part, zip(*found, strict=True), strict=True):
        to[batch.tokens] = torch.cat(spans, dim=1).reshape(-1, *to.shape[1:])


def _spans(
    batch: Batch, q_TNH: torch.Tensor, k_KRCH: torch.Tensor, v_KRCH: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return what is multiplied at once: queries, keys, values, and the bias of their scores."""
    heads, size = k_KRCH.shape[0], k_KRCH.shape[-1]
    shape = (batch.num_rows, batch.num_queries, heads, -1, size)
    q_RQKGH = q_TNH[batch.tokens].view(shape)
    for span in batch.spans:
        k, v = k_KRCH[:, :, : span.context], v_KRCH[:, :, : span.context]
        yield q_RQKGH[:, span.first : span.end], k, v, span.bias
