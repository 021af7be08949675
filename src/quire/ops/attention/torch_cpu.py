"""Attention with torch operations, on any device; its sizes are tuned for a CPU's caches.

Shape legend: as in `base.py`, and Y layers of a group, R rows of a batch, Q new tokens per row, G
query heads of one KV head (N = K G), C context tokens per row (whole blocks), J = G Q, B = K R.

Keys and values of a group have the layout [2, Y, K, B, P, H]. So gathering blocks along B gives
each head's tokens in order, without a transposition. `prepare` sorts a step's rows into batches of
rows with equally many new tokens and about equally long contexts. Per layer each batch is

    gather blocks  ->  scores q k^T + bias  ->  softmax  ->  weights times v

with so few keys and values that they stay in the cache in between. The query heads of a KV head are
treated as further queries of it, so keys and values are never repeated.

Latent vectors have the layout [1, Y, 1, B, P, L], and are both keys and values.
"""

import math
from collections.abc import Iterator

import torch

from quire.ops.attention.base import Expand, KVLayout, Part, refuse_kv_format
from quire.ops.attention.batches import Batch, BatchBuilder
from quire.ops.attention.kv_memory import KVMemory
from quire.ops.attention.states import StatesInBlocks
from quire.ops.attention_inputs import AttentionStep, Scores
from quire.ops.precision import accumulation_dtype
from quire.ops.registry import op
from quire.spec.cache_group import STATE


def weigh(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Return softmax(scores + bias) v, [R, Q, K, G, H], with the scores that `Scores` defines."""
    is_slow = k_KRCH.device.type == "cpu" and k_KRCH.dtype.itemsize == 2
    if scores.soft_cap is None and scores.sinks_N is None and not is_slow:
        return _by_fused_operation(q_RQKGH, k_KRCH, v_KRCH, bias_R1QC, scores.scale)
    # The fused operation has neither soft caps nor sinks. On a CPU its 16-bit products are slow:
    # matrix products are three times as fast.
    return _by_products(q_RQKGH, k_KRCH, v_KRCH, bias_R1QC, scores)


def weigh_part(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `weigh` without sinks, [R, Q, K, G, H], and the logarithms of the sums of e^score,
    [R, Q, K, G], in the accumulation dtype."""
    rows, queries, heads, group, size = q_RQKGH.shape
    scores_BJC = _score(q_RQKGH, k_KRCH, bias_R1QC, scores)
    scores_BJC = scores_BJC.to(accumulation_dtype(scores_BJC.dtype))
    log_sums_BJ1 = scores_BJC.logsumexp(-1, keepdim=True)
    weights_BJC = (scores_BJC - log_sums_BJ1).exp()
    out_BJH = torch.bmm(weights_BJC, v_KRCH.flatten(0, 1).to(weights_BJC.dtype))
    out_RQKGH, log_sums_RQKG1 = (
        x_BJX.view(heads, rows, group, queries, -1).permute(1, 3, 0, 2, 4)
        for x_BJX in (out_BJH, log_sums_BJ1)
    )
    return out_RQKGH, log_sums_RQKG1[..., 0]


def _score(
    q_RQKGH: torch.Tensor, k_KRCH: torch.Tensor, bias_R1QC: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Return the scores [B, J, C], rounded to the dtype if there is no soft cap."""
    rows, queries, heads, group, size = q_RQKGH.shape
    q_BJH = q_RQKGH.permute(2, 0, 3, 1, 4).reshape(heads * rows, group * queries, size)
    k_BHC = k_KRCH.flatten(0, 1).transpose(1, 2)
    # The product itself broadcasts the bias of a single row over the heads.
    bias_BJC = bias_R1QC.expand(heads if rows > 1 else 1, rows, group, queries, -1)
    bias_BJC = bias_BJC.reshape(-1, group * queries, k_BHC.shape[2])
    cap = scores.soft_cap
    beta = 1 if cap is None else 0
    scores_BJC = torch.baddbmm(bias_BJC, q_BJH, k_BHC, beta=beta, alpha=scores.scale)
    if cap is not None:
        dtype = accumulation_dtype(q_BJH.dtype)
        scores_BJC = torch.tanh(scores_BJC.to(dtype) / cap) * cap + bias_BJC
    return scores_BJC


def _by_products(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scores: Scores,
) -> torch.Tensor:
    """Compute `weigh` by matrix products. Scores and weights are rounded to the dtype at least
    once; sums within an operation are not."""
    rows, queries, heads, group, size = q_RQKGH.shape
    scores_BJC = _score(q_RQKGH, k_KRCH, bias_R1QC, scores)
    v_BCH, dtype = v_KRCH.flatten(0, 1), accumulation_dtype(q_RQKGH.dtype)
    if scores.sinks_N is None:
        weights_BJC = scores_BJC.softmax(-1)
    else:
        # A sink is one more key without a value.
        sinks_KRGQ = scores.sinks_N.view(heads, 1, group, 1).expand(-1, rows, -1, queries)
        sinks_BJ1 = sinks_KRGQ.reshape(heads * rows, group * queries, 1)
        weights_BJC = torch.cat([scores_BJC.to(dtype), sinks_BJ1.to(dtype)], -1).softmax(-1)
        weights_BJC = weights_BJC[..., :-1]
    out_BJH = torch.bmm(weights_BJC.to(v_BCH.dtype), v_BCH)
    return out_BJH.view(heads, rows, group, queries, -1).permute(1, 3, 0, 2, 4)


def _by_fused_operation(
    q_RQKGH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    bias_R1QC: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Compute `weigh` by torch's fused operation."""
    rows, queries, heads, group, size = q_RQKGH.shape
    q_RKJH = q_RQKGH.permute(0, 2, 3, 1, 4).reshape(rows, heads, group * queries, size)
    bias_R1JC = bias_R1QC.repeat(1, 1, group, 1)
    out_RKJH = torch.nn.functional.scaled_dot_product_attention(
        q_RKJH, k_KRCH.transpose(0, 1), v_KRCH.transpose(0, 1), attn_mask=bias_R1JC, scale=scale
    )
    return out_RKJH.view(rows, heads, group, queries, -1).permute(0, 3, 1, 2, 4)


class TorchBackend(StatesInBlocks):
    """Backend that gathers the blocks of a batch, then multiplies."""

    name = "torch"

    def __init__(self, layout: KVLayout) -> None:
        refuse_kv_format(self.name, layout)
        # The memory must begin as zeros: tokens that a row does not see get the weight 0, and
        # 0 * NaN would be NaN.
        self._memory = KVMemory(layout)
        self._kv = self._memory.kv
        self._location_of_layer = self._memory.location
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
                # Values of the block's earlier owner could be NaN.
                self._kv[g].index_fill_(3, begun, 0.0)

    @op("kv_write")
    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> None:
        """Store this step's keys and values, [T, K, H] each, in their slots."""
        g, index = self._location_of_layer[layer]
        slots_T = self._slots_T[g]
        kv = self._kv[g][:, index].flatten(2, 3)
        kv[0].index_copy_(1, slots_T, k_TKH.transpose(0, 1))
        kv[1].index_copy_(1, slots_T, v_TKH.transpose(0, 1))

    @op("latent_write")
    def write_latent(self, layer: int, latent_TL: torch.Tensor) -> None:
        """See AttentionBackend."""
        g, index = self._location_of_layer[layer]
        self._kv[g][0, index, 0].flatten(0, 1).index_copy_(0, self._slots_T[g], latent_TL)

    @op("attention")
    def run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend batch by batch, [T, N, H]."""
        return self._run(layer, q_TNH, scores, out_TNH)

    @op("latent_attention")
    def run_latent(
        self, layer: int, q_TNL: torch.Tensor, scores: Scores, num_values: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        return self._run(layer, q_TNL, scores, None)[..., :num_values].contiguous()

    def prefers_expanded(self, min_tokens: int) -> bool:
        """See AttentionBackend. On a CPU a token's bits must not depend on its step's chunks."""
        assert self._step is not None, "prepare() comes first"
        is_gpu, lens = self._layout.device.type != "cpu", self._step.query_lens_host
        return is_gpu and bool(lens.sum() >= min_tokens * len(lens))

    @op("expanded_attention")
    def run_expanded(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, expand: Expand, num_values: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        g, index = self._location_of_layer[layer]
        out_TNV = q_TNH.new_empty(*q_TNH.shape[:2], num_values)
        for batch in self._batches[g]:
            latent_1RCL, _ = self._gather(self._kv[g][:, index], batch)
            num_rows = latent_1RCL.shape[1]
            made = (x.unflatten(0, (num_rows, -1)) for x in expand(latent_1RCL.flatten(0, 2)))
            k_NRCH, v_NRCV = (x_RCNX.permute(2, 0, 1, 3) for x_RCNX in made)
            _attend(batch, q_TNH, k_NRCH, v_NRCV, scores, out_TNV)
        return out_TNV

    def _run(
        self, layer: int, q_TNH: torch.Tensor, scores: Scores, out_TNH: torch.Tensor | None
    ) -> torch.Tensor:
        if out_TNH is None:
            out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        g, index = self._location_of_layer[layer]
        kv = self._kv[g][:, index]
        for batch in self._batches[g]:
            k_KRCH, v_KRCH = self._gather(kv, batch)
            _attend(batch, q_TNH, k_KRCH, v_KRCH, scores, out_TNH)
        return out_TNH

    def run_part(self, layer: int, q_TNH: torch.Tensor, scores: Scores) -> Part:
        """See AttentionBackend."""
        out_TNH = q_TNH.new_empty(q_TNH.shape, dtype=accumulation_dtype(q_TNH.dtype))
        part = Part(out_TNH, out_TNH.new_empty(out_TNH.shape[:2]))
        g, index = self._location_of_layer[layer]
        kv = self._kv[g][:, index]
        for batch in self._batches[g]:
            k_KRCH, v_KRCH = self._gather(kv, batch)
            _attend_part(batch, q_TNH, k_KRCH, v_KRCH, scores, part)
        return part

    def _gather(self, kv: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch's keys and values, [K, R, C, H] each, in memory that the next batch
        reuses. New memory per gather would cost more than the gather: its pages must be mapped.
        Both are the latent vectors in a latent group."""
        vectors, heads, _, block_size, size = kv.shape
        shape = (vectors, heads, batch.blocks.numel(), block_size, size)
        count = math.prod(shape)
        if self._scratch.numel() < count:
            self._scratch = self._scratch.new_empty(count)
        gathered = self._scratch[:count].view(shape)
        torch.index_select(kv, 2, batch.blocks, out=gathered)
        gathered = gathered.view(vectors, heads, batch.num_rows, -1, size)
        return gathered[0], gathered[-1]


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
    out_TNH[batch.tokens] = out_RQKGH.reshape(-1, *out_TNH.shape[1:])


def _attend_part(
    batch: Batch,
    q_TNH: torch.Tensor,
    k_KRCH: torch.Tensor,
    v_KRCH: torch.Tensor,
    scores: Scores,
    part: Part,
) -> None:
    """Write attention of the batch's tokens to their rows of a part."""
    found = [weigh_part(*given, scores) for given in _spans(batch, q_TNH, k_KRCH, v_KRCH)]
    for to, spans in zip(part, zip(*found, strict=True), strict=True):
        to[batch.tokens] = torch.cat(spans, dim=1).reshape(-1, *to.shape[1:])


def _spans(
    batch: Batch, q_TNH: torch.Tensor, k_KRCH: torch.Tensor, v_KRCH: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield the operands of each product: queries, keys, values and bias."""
    heads, size = k_KRCH.shape[0], k_KRCH.shape[-1]
    shape = (batch.num_rows, batch.num_queries, heads, -1, size)
    q_RQKGH = q_TNH[batch.tokens].view(shape)
    for span in batch.spans:
        k, v = k_KRCH[:, :, : span.context], v_KRCH[:, :, : span.context]
        yield q_RQKGH[:, span.first : span.end], k, v, span.bias
