"""Llama 4: layers that attend within chunks of the sequence, and layers without rotary embedding
that attend to all tokens. Experts get their input scaled by the router, next to a shared expert.

Shape legend: T tokens, D model dim, O outputs of the QKV projection, N query heads, K KV heads, H
head dim.
"""

from dataclasses import replace

import torch
from torch import nn

from quire.models.parts.decoder import (
    DecoderAttention,
    DecoderLayer,
    GatedMLP,
    LayerPlace,
    LayerStep,
)
from quire.models.parts.experts import ExpertForm, SparseMLP
from quire.models.parts.layers import ParamFactory
from quire.models.parts.options import DecoderOptions
from quire.models.parts.text_part import TextPart
from quire.ops.collective import all_reduce
from quire.ops.elementwise import add, scale_by_position, scale_by_top
from quire.ops.moe import moe_route
from quire.spec.layer_windows import rotated_layers
from quire.spec.model_spec import ModelSpec

INSIDE = "feed_forward"
FORM = ExpertForm(router="router", stand_alone=False, is_turned=True)


class LengthNorm:
    """RMS normalisation of query and key heads by weights of 1. Checkpoints mean it to follow the
    rotation. That does not change a head's length, so it may as well come before.

    scale: factor of the rotation, which the norm would remove again, except for the epsilon."""

    def __init__(
        self, num_heads: int, size: int, eps: float, scale: float, factory: ParamFactory
    ) -> None:
        self.weight = torch.ones(num_heads, size, dtype=factory.dtype, device=factory.device)
        self.eps = eps / scale**2


class Llama4Attention(DecoderAttention):
    """Attention that normalises heads in layers with rotary embedding. In the others it scales
    queries by their position."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__(at)
        fields, has_rope = at.spec.fields, at.options.ropes[at.layer] is not None
        if has_rope and fields.flag("use_qk_norm"):
            num_heads = self._heads + self._kv_heads
            eps, scale = at.spec.layers.norm_eps, at.spec.rope.scale
            self.qk_norm = LengthNorm(num_heads, at.spec.head_dim, eps, scale, at.factory)
        self._is_tuned = not has_rope and fields.flag("attn_temperature_tuning")
        self._period, self._factor = fields.integer("floor_scale"), fields.number("attn_scale")

    def _attend(self, qkv_TO: torch.Tensor, step: LayerStep) -> torch.Tensor:
        """See DecoderAttention."""
        if not self._is_tuned:
            return super()._attend(qkv_TO, step)
        heads, kv_heads, size = self._heads, self._kv_heads, self._head_dim
        q_TM, k_TM, v_TM = qkv_TO.split([heads * size, kv_heads * size, kv_heads * size], dim=1)
        q_TM = scale_by_position(q_TM, step.positions_T, self._period, self._factor)
        q_TNH, k_TKH, v_TKH = (x_TM.unflatten(1, (-1, size)) for x_TM in (q_TM, k_TM, v_TM))
        return self.attention(q_TNH, k_TKH, v_TKH, step.backend)


class ScaledExperts(SparseMLP):
    """One expert for each token, whose input is scaled by the router's sigmoid."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        logits_TE = self.router(x_TD)
        ids_T1, ones_T1 = moe_route(logits_TE, 1, True)
        out_TD: torch.Tensor = self.experts(scale_by_top(x_TD, logits_TE), ids_T1, ones_T1)
        return out_TD if self._group is None else all_reduce(out_TD, self._group)


class Llama4MLP(nn.Module):
    """The outputs of one expert and of the shared expert."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        experts = at.options.experts
        assert experts is not None, "only layers with experts have this"
        name = f"{at.name}.{INSIDE}"
        self.sparse = ScaledExperts(name, at.spec, experts, at.factory, FORM)
        self.shared = GatedMLP(at, inside=f"{INSIDE}.shared_expert", inner=experts.shared_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return add(self.sparse(x_TD), self.shared(x_TD))


class Llama4Layer(DecoderLayer):
    """A layer with experts, or with a dense feed-forward layer."""

    def make_attention(self, at: LayerPlace) -> nn.Module:
        """See DecoderLayer."""
        return Llama4Attention(at)

    def make_mlp(self, at: LayerPlace) -> nn.Module:
        """See DecoderLayer."""
        experts = at.options.experts
        assert experts is not None, "a config without experts is refused"
        return Llama4MLP(at) if experts.is_sparse(at.layer) else GatedMLP(at, inside=INSIDE)


class Llama4(TextPart):
    """The text model (`llama4_text`), also as the text part of `llama4`, whose images are
    refused."""

    layer_kind = Llama4Layer
    of_images = ("vision_model.", "multi_modal_projector.")

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias, turns = spec.layers.attention_bias, rotated_layers(spec.fields, spec.num_layers)
        rope = spec.rope
        if spec.fields.flag("use_qk_norm"):
            rope = replace(rope, scale=1.0)  # see LengthNorm
        options = DecoderOptions(
            qkv_bias=bias,
            output_bias=bias,
            experts=spec.experts,
            ropes=[rope if each else None for each in turns],
            interleaved=True,
        )
        super().__init__(spec, options, factory)
