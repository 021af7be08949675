"""Qwen 3 Next: linear attention in three of four layers, attention with a gate in the others, and a
mixture of experts with one that all tokens are sent to."""

from collections.abc import Iterable
from typing import ClassVar

from torch import nn

from quire.base.model_spec import ModelSpec
from quire.base.rope_options import rope_options
from quire.models.decoder import Decoder, LayerPlace
from quire.models.gated_attention import GatedAttention
from quire.models.layers import ParamFactory
from quire.models.linear_attention import Inputs, LinearAttentionLayer
from quire.models.options import DecoderOptions
from quire.models.qwen2_moe import Qwen2MoeLayer

MORE_TOKENS = "mtp."  # tensors of a part that guesses more tokens, which is not run


class Qwen3NextLayer(Qwen2MoeLayer):
    """Attention of the kind that the config says of this layer."""

    by_key_head: ClassVar[bool] = True  # how checkpoints have what goes into linear attention

    def make_attention(self, at: LayerPlace) -> nn.Module:
        if at.layer in at.spec.linear_layers:
            return LinearAttentionLayer(at, by_key_head=self.by_key_head)
        return GatedAttention(at)


class Qwen3Next(Decoder):
    """A whole model."""

    layer_kind = Qwen3NextLayer

    def __init__(self, spec: ModelSpec, factory: ParamFactory) -> None:
        super().__init__(spec, hybrid_options(spec), factory)

    def adopt(self, names: Iterable[str]) -> None:
        """See Model: what goes into linear attention stands there in one matrix or two, too."""
        names = list(names)
        super().adopt(names)
        stored = {own for name in names for own in self.names_of(name)}
        for module in self.modules():
            if isinstance(module, Inputs):
                module.adopt(stored)

    def ignores(self, name: str) -> bool:
        """See Model; and the part that guesses more tokens."""
        return name.startswith(MORE_TOKENS) or super().ignores(name)


def hybrid_options(spec: ModelSpec) -> DecoderOptions:
    """Read what Qwen 3 Next and Qwen 3.5 share."""
    bias = spec.layers.attention_bias
    rope = rope_options(spec.fields, spec.head_dim, spec.max_position, default_part=0.25)
    layers = range(spec.num_layers)
    return DecoderOptions(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        experts=spec.experts,
        norm_offset=1.0,
        ropes=[None if layer in spec.linear_layers else rope for layer in layers],
    )
