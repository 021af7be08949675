"""GPT-NeoX and Pythia: layer norms, one projection whose rows are grouped by head, and attention
and feed-forward layer in parallel.

Shape legend: T tokens, D model dim.
"""

import torch
from torch import nn

from quire.models.parts.decoder import Decoder, DecoderAttention, LayerPlace, LayerStep
from quire.models.parts.layers import LayerNorm, Linear, ParamFactory, StreamNorm, activation
from quire.models.parts.options import DecoderOptions
from quire.ops.elementwise import add
from quire.spec.model_spec import ModelSpec
from quire.spec.rope_options import RopeOptions, own_fields, rope_of, rotated_dims


class NeoXMLP(nn.Module):
    """down(activation(up(x))), always with biases."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        size, name = at.spec.hidden_size, f"{at.name}.mlp"
        inner = at.inner(at.spec.intermediate_size)
        self.up = Linear([f"{name}.dense_h_to_4h"], size, [inner], at.factory, bias=True)
        self.down = Linear([f"{name}.dense_4h_to_h"], inner, [size], at.factory, bias=True)
        self._activation = activation(at.spec.layers.activation)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self._activation(self.up(x_TD)))
        return out


class NeoXLayer(nn.Module):
    """Attention and feed-forward with a norm each. They run in parallel on the same stream, or in
    sequence."""

    def __init__(self, at: LayerPlace) -> None:
        super().__init__()
        self._is_parallel = at.spec.fields.flag("use_parallel_residual", True)
        self.attention_norm = layer_norm_of(at.spec, f"{at.name}.input_layernorm", at.factory)
        self.attention = DecoderAttention(
            at, ("query_key_value", "dense"), "attention", by_head=True
        )
        self.mlp_norm = layer_norm_of(at.spec, f"{at.name}.post_attention_layernorm", at.factory)
        self.mlp = NeoXMLP(at)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None, step: LayerStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See DecoderLayer."""
        x_TD, residual_TD = self.attention_norm(x_TD, residual_TD)
        attended_TD = self.attention(x_TD, step)
        if self._is_parallel:
            return add(attended_TD, self.mlp(self.mlp_norm(residual_TD)[0])), residual_TD
        x_TD, residual_TD = self.mlp_norm(attended_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class GPTNeoX(Decoder):
    """A whole GPT-NeoX model."""

    base_prefix = "gpt_neox."
    ignored_tensors = (".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq")
    layer_kind = NeoXLayer
    embedding_name, norm_name, head_tensor = "embed_in", "final_layer_norm", "embed_out.weight"

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        bias, ropes = spec.fields.flag("attention_bias"), [neox_rope(spec)] * spec.num_layers
        super().__init__(spec, DecoderOptions(bias, bias, ropes=ropes), factory)

    def names_of(self, name: str) -> tuple[str, ...]:
        """See Model. transformers 5 names the head `lm_head`."""
        return super().names_of(self.head_tensor if name == "lm_head.weight" else name)

    def make_norm(self, spec: ModelSpec, factory: ParamFactory) -> nn.Module:
        return layer_norm_of(spec, f"{self.base_prefix}{self.norm_name}", factory)


def layer_norm_of(spec: ModelSpec, name: str, factory: ParamFactory) -> StreamNorm:
    eps = spec.fields.number("layer_norm_eps", 1e-5, above=False)
    return StreamNorm(LayerNorm(name, spec.hidden_size, eps, factory))


def neox_rope(spec: ModelSpec) -> RopeOptions:
    """Read the rotary embedding, which has its own names for two fields."""
    fields = spec.fields
    if fields.has("head_dim") and fields.integer("head_dim") != spec.head_dim:
        raise fields.error("head_dim", f"heads of gpt_neox have {spec.head_dim} dimensions here")
    own = own_fields(fields)
    name = "partial_rotary_factor"
    holder, name = (own, name) if own.has(name) else (fields, "rotary_pct")
    rotated = rotated_dims(holder, name, spec.head_dim)
    return rope_of(own, fields, rotated, spec.max_position, theta_name="rotary_emb_base")
