"""What the decoders of Llama's kind differ in. No torch: outlines are made of it, too."""

from dataclasses import dataclass

from quire.base.model_options import ExpertOptions


@dataclass(frozen=True)
class DecoderOptions:
    """Which optional parts the layers have."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertOptions | None = None
