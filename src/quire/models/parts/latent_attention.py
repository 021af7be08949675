"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shape legend: T tokens, D model dim, N query heads of this rank, P dimensions of a head without
rotation, E with rotation, R size of a compressed vector, L = R + E, V size of a head's value.

The absorbed form multiplies queries with each head's key weights and attends over the cached latent
vectors themselves. The expanded form makes each head's keys and values of all cached vectors. It
costs less where rows have many new tokens (`AttentionBackend.prefers_expanded`); its sums have
another order. On a CPU all tokens take the absorbed form, so a token's bits do not depend on how a
prompt is divided.
"""

from functools import partial

import torch
from torch import nn

from quire.models.parts.decoder import LayerPlace, LayerStep
from quire.models.parts.head_linear import HeadLinear
from quire.models.parts.layers import Attention, Linear, RMSNorm
from quire.models.parts.rope import head_order
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention_inputs import Scores
from quire.ops.elementwise import concatenate
from quire.ops.latent import expand_latents, join_heads, latent_queries, latent_values
from quire.ops.rotary import rotary
from quire.spec.cuts import Cut
from quire.spec.deepseek.latent_attention import LatentAttention

NORM_EPS = 1e-6  # of the norms of compressed vectors, whatever the config says
NEVER = 1 << 31


class LatentAttentionLayer(nn.Module):
    """The projections of latent attention, its two forms, and the output projection.

    Rows of the query projection are ordered: first the part of all heads without rotation, then
    the rotated part, whose pairs are halves (rope.py). inside: checkpoint module of the layer's
    attention. has_bias: whether projections to compressed vectors and to the output have biases.
    """

    def __init__(
        self, at: LayerPlace, inside: str = "self_attn", *, has_bias: bool = False
    ) -> None:
        super().__init__()
        spec, factory, sizes = at.spec, at.factory, at.spec.latent
        assert sizes is not None, "the type has latent attention"
        name, heads = f"{at.name}.{inside}", at.heads
        self._sizes, self._heads = sizes, heads.count
        order = head_order(sizes.rotated_dim, sizes.rotated_dim, interleaved=sizes.is_interleaved)
        of_latent = _after(sizes.rank, order)
        query_rank, query = sizes.query_rank, f"{name}.q_proj"
        names, outputs, orders = ["kv_a_proj_with_mqa"], [sizes.latent_dim], [of_latent]
        self.query_norm = None
        if query_rank is not None:
            names, outputs, orders = ["q_a_proj", *names], [query_rank, *outputs], [None, of_latent]
            query = f"{name}.q_b_proj"
            self.query_norm = RMSNorm(f"{name}.q_a_layernorm", query_rank, NORM_EPS, factory)
        self.compress = Linear(
            [f"{name}.{each}" for each in names], spec.hidden_size, outputs, factory,
            bias=has_bias, orders=orders,
        )  # fmt: skip
        self.query = Linear(
            [query],
            query_rank or spec.hidden_size,
            [[heads.times(sizes.plain_dim), heads.times(sizes.rotated_dim)]],
            factory,
            orders=[_plain_first(heads.whole, sizes, order)],
        )
        self.latent_norm = RMSNorm(f"{name}.kv_a_layernorm", sizes.rank, NORM_EPS, factory)
        kv, of_head = f"{name}.kv_b_proj", sizes.plain_dim + sizes.value_dim
        keys = Cut(of_head, 0, sizes.plain_dim)
        values = Cut(of_head, sizes.plain_dim, sizes.value_dim)
        self.keys = HeadLinear(kv, heads, keys, sizes.rank, factory, is_turned=True)
        self.values = HeadLinear(kv, heads, values, sizes.rank, factory, is_turned=False)
        self.output = Linear(
            [f"{name}.o_proj"], heads.times(sizes.value_dim), [spec.hidden_size], factory,
            bias=has_bias,
        )  # fmt: skip
        self.attention = Attention(at.layer, Scores(sizes.scale))
        self._min_expanded = min_expanded_tokens(sizes)

    def forward(self, x_TD: torch.Tensor, step: LayerStep) -> torch.Tensor:
        rotary_rows, backend, _ = step
        assert rotary_rows is not None, "a part of each head is rotated"
        sizes, heads = self._sizes, self._heads
        compressed = self.compress(x_TD)
        if self.query_norm is not None:
            compressed_q, compressed = compressed.split(
                [compressed.shape[1] - sizes.latent_dim, sizes.latent_dim], dim=1
            )
            x_TD = self.query_norm(compressed_q)[0]
        own_TR, k_TE = compressed.split([sizes.rank, sizes.rotated_dim], dim=1)
        k_T1E = rotary(k_TE.unflatten(1, (1, -1)), rotary_rows)
        latent_TL = concatenate(self.latent_norm(own_TR)[0], k_T1E.flatten(1))
        backend.write_latent(self.attention.layer, latent_TL)
        plain, turned = heads * sizes.plain_dim, heads * sizes.rotated_dim
        q_TM, q_TO = self.query(x_TD).split([plain, turned], dim=1)
        q_TNP, q_TNE = q_TM.unflatten(1, (heads, -1)), q_TO.unflatten(1, (heads, -1))
        read_TNV = self._attend(q_TNP, rotary(q_TNE, rotary_rows), backend)
        out_TD: torch.Tensor = self.output(read_TNV.flatten(1))
        return out_TD

    def _attend(
        self, q_TNP: torch.Tensor, q_TNE: torch.Tensor, backend: AttentionBackend
    ) -> torch.Tensor:
        """Attend with queries [T, N, P] and their rotated parts; return [T, N, V]."""
        sizes, layer, scores = self._sizes, self.attention.layer, self.attention.scores
        if backend.prefers_expanded(self._min_expanded):
            keys, values = self.keys.weights, self.values.weights
            expand = partial(expand_latents, keys=keys, values=values)
            q_TNH = join_heads(q_TNP, q_TNE)
            return backend.run_expanded(layer, q_TNH, scores, expand, sizes.value_dim)
        q_TNL = latent_queries(q_TNP, q_TNE, self.keys.weights)
        read_TNR = backend.run_latent(layer, q_TNL, scores, sizes.rank)
        return latent_values(read_TNR, self.values.weights)


def min_expanded_tokens(sizes: LatentAttention) -> int:
    """Return the new tokens of a row from which the expanded form takes fewer products.

    Per head and cached token, making its key and value takes R (P + V) products. Per query and
    cached token, the expanded form takes P + E + V products, and the absorbed form L + R."""
    once = sizes.rank * (sizes.plain_dim + sizes.value_dim)
    saved = sizes.latent_dim + sizes.rank - sizes.query_dim - sizes.value_dim
    return once // saved + 1 if saved > 0 else NEVER


def _after(first: int, order_E: torch.Tensor | None) -> torch.Tensor | None:
    """Return an order of dimensions after `first` others that stay, int64 [first + E]."""
    if order_E is None:
        return None
    return torch.cat((torch.arange(first), first + order_E))


def _plain_first(heads: int, sizes: LatentAttention, order_E: torch.Tensor | None) -> torch.Tensor:
    """Return the row order of a projection stored as [plain | rotated] per head, int64 [N (P + E)].
    All plain parts come first. order: permutation of the rotated dimensions."""
    of_all = torch.arange(heads * sizes.query_dim).view(heads, sizes.query_dim)
    plain, rotated = of_all.split([sizes.plain_dim, sizes.rotated_dim], dim=1)
    if order_E is not None:
        rotated = rotated[:, order_E]
    return torch.cat((plain.flatten(), rotated.flatten()))
