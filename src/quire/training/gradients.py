"""Gradients of values that the engine computed.

The engine's program returns the inputs of all layers. `Recomputed` puts these values into torch's
graph. Its backward pass computes one part of the model again, with the formulas of this file, and
differentiates it. So only the layers' inputs are stored between the passes (Chen et al. 2016,
arXiv 1604.06174). The gradient treats rounding to the engine's dtype as the identity.

Shape legend: T tokens, S sequences, M longest sequence, D model dim, N query heads, K KV heads,
H head dim, E = H / 2, R response tokens, C experts of a token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from quire.models.parts.rope import rope_frequencies
from quire.spec.model_spec import ModelSpec

Weights = Mapping[str, torch.Tensor]
Formula = Callable[..., torch.Tensor]  # of the input and the parameters, in order


@dataclass(frozen=True, eq=False)
class Recipe:
    """A part of the model: the engine's values, the formula, and the dtype of its parameters."""

    values: torch.Tensor
    formula: Formula
    dtype: torch.dtype


class Recomputed(torch.autograd.Function):
    """The engine's values of a part of the model, whose backward pass recomputes the part."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the recipe's values. inputs: float32, the part's input and its parameters."""
        # Keep no reference to the result: such a cycle would keep all activations in memory.
        ctx.formula, ctx.dtype = recipe.formula, recipe.dtype
        ctx.save_for_backward(*inputs)
        return recipe.values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the inputs, such as [T, D]."""
        needed = ctx.needs_input_grad[1:]
        first, *parameters = ctx.saved_tensors
        rounded = [each.to(ctx.dtype).float() for each in parameters]
        inputs = [each.detach() for each in (first, *rounded)]
        for tensor, is_needed in zip(inputs, needed, strict=True):
            tensor.requires_grad_(is_needed)
        with torch.enable_grad():
            values = ctx.formula(*inputs)
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        # Experts that no token used have no gradient; materialising makes it zero.
        found = iter(torch.autograd.grad(values, leaves, gradient, materialize_grads=True))
        return None, *(next(found) if is_needed else None for is_needed in needed)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension, [..., D], by its root mean square."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class Padding:
    """Batches of sequences of similar lengths, padded to the longest of each batch.

    index_SM: the token of each place, of each batch; any token in places that pad. place_T: the
    place of each token, counted over all batches. positions_T: within the sequences.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        lengths_S = torch.tensor(lengths)
        first_S = lengths_S.cumsum(0) - lengths_S
        sizes_S = torch.tensor([length.bit_length() for length in lengths])
        self.positions_T = torch.cat([torch.arange(length) for length in lengths])
        self.place_T, begin = torch.empty_like(self.positions_T), 0
        self.index_SM = list[torch.Tensor]()
        for size in sizes_S.unique():
            own_S = (sizes_S == size).nonzero()[:, 0]
            places_M = torch.arange(int(lengths_S[own_S].max()))
            is_token_SM = places_M < lengths_S[own_S, None]
            index_SM = (first_S[own_S, None] + places_M).where(is_token_SM, first_S[own_S, None])
            places_SM = torch.arange(begin, begin + index_SM.numel()).view_as(index_SM)
            self.place_T[index_SM[is_token_SM]] = places_SM[is_token_SM]
            self.index_SM.append(index_SM)
            begin += index_SM.numel()


class LayerFormula:
    """A decoder layer over packed sequences, in torch and float32.

    names: names of the parameters within the layer, in the order of the call's arguments.
    experts_TC: experts of each token, for a layer that is a mixture.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        names: Sequence[str],
        padding: Padding,
        experts_TC: torch.Tensor | None = None,
    ) -> None:
        self._spec, self._names, self._padding = spec, names, padding
        self._experts_TC = experts_TC
        self._eps, self._window = spec.layers.norm_eps, spec.layer_windows[layer]

    def __call__(self, x_TD: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        weights = dict(zip(self._names, parameters, strict=True))
        normed_TD = rms_norm(x_TD, weights["input_layernorm.weight"], self._eps)
        x_TD = x_TD + self._attention(normed_TD, weights)
        normed_TD = rms_norm(x_TD, weights["post_attention_layernorm.weight"], self._eps)
        if self._experts_TC is not None:
            return x_TD + self._mixture(normed_TD, weights, self._experts_TC)
        return x_TD + _gated(normed_TD, weights, "mlp.")

    def _mixture(
        self, x_TD: torch.Tensor, weights: Weights, experts_TC: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts. The choice itself has no gradient."""
        options, ids_TC = self._spec.experts, experts_TC.long()
        assert options is not None
        logits_TE = _linear(x_TD, weights, "mlp.gate")
        if options.normalises:
            shares_TC = logits_TE.gather(-1, ids_TC).softmax(-1)
        else:
            shares_TC = logits_TE.softmax(-1).gather(-1, ids_TC)
        total_TD = torch.zeros_like(x_TD)
        for expert in range(options.num_experts):
            tokens, places = (ids_TC == expert).nonzero(as_tuple=True)
            if len(tokens):
                own = _gated(x_TD.index_select(0, tokens), weights, f"mlp.experts.{expert}.")
                shares = shares_TC[tokens, places]
                total_TD = total_TD.index_add(0, tokens, own * shares[:, None])
        return total_TD

    def _attention(self, x_TD: torch.Tensor, weights: Weights) -> torch.Tensor:
        size, inside = self._spec.head_dim, "self_attn."
        heads = {}
        for name in "qkv":
            heads_TNH = _linear(x_TD, weights, f"{inside}{name}_proj").unflatten(-1, (-1, size))
            norm = weights.get(f"{inside}{name}_norm.weight")
            heads[name] = heads_TNH if norm is None else rms_norm(heads_TNH, norm, self._eps)
        positions_T = self._padding.positions_T
        q_TNH, k_TKH = (_rotated(heads[name], positions_T, self._spec) for name in "qk")
        read_TNH = self._attend(q_TNH, k_TKH, heads["v"])
        return _linear(read_TNH.flatten(1), weights, f"{inside}o_proj")

    def _attend(
        self, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor
    ) -> torch.Tensor:
        """Return causal attention within each sequence, [T, N, H]."""
        found, window = list[torch.Tensor](), self._window
        for index_SM in self._padding.index_SM:
            q, k, v = (_gather(each, index_SM).transpose(1, 2) for each in (q_TNH, k_TKH, v_TKH))
            mask, longest = None, index_SM.shape[1]
            if window is not None and longest > window:
                mask = torch.ones(longest, longest, dtype=torch.bool).tril().triu(1 - window)
            read_SNMH = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, enable_gqa=True
            )
            found.append(read_SNMH.transpose(1, 2).flatten(0, 1))
        return torch.cat(found).index_select(0, self._padding.place_T)


def head_formula(rows_R: torch.Tensor, ids_R: torch.Tensor, eps: float) -> Formula:
    """Return the formula of the tokens' log-probabilities [R] after some rows of the last layer's
    output [T, D]."""

    def formula(x_TD: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits_RV = rms_norm(x_TD.index_select(0, rows_R), norm, eps) @ head.T
        return logits_RV.log_softmax(-1).gather(-1, ids_R[:, None])[:, 0]

    return formula


def _gather(x_TNH: torch.Tensor, index_SM: torch.Tensor) -> torch.Tensor:
    """Return rows of x, [S, M, N, H]. Unlike indexing, this has a fast gradient on a CPU."""
    rows = x_TNH.index_select(0, index_SM.flatten())
    return rows.view(*index_SM.shape, *x_TNH.shape[1:])


def _linear(x_TI: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    return F.linear(x_TI, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _gated(x_TD: torch.Tensor, weights: Weights, before: str) -> torch.Tensor:
    """Return down(silu(gate(x)) * up(x)), [T, D]. before: prefix of the names of the weights."""
    gate_TF = F.silu(_linear(x_TD, weights, f"{before}gate_proj"))
    return _linear(
        gate_TF * _linear(x_TD, weights, f"{before}up_proj"), weights, f"{before}down_proj"
    )


def _rotated(x_TNH: torch.Tensor, positions_T: torch.Tensor, spec: ModelSpec) -> torch.Tensor:
    """Rotate each pair (e, e + H / 2) of a head's dimensions by its position's angle."""
    rope = spec.rope
    angles_T1E = (positions_T[:, None] * rope_frequencies(rope, spec.head_dim))[:, None]
    cos, sin = ((each * rope.scale).float() for each in (angles_T1E.cos(), angles_T1E.sin()))
    one, other = x_TNH.chunk(2, dim=-1)
    return torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1)
