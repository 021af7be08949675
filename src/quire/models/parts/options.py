"""Options in which Llama-like decoders differ. A model with another structure defines a layer class
in its own file."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.spec.model_options import ExpertOptions
from quire.spec.rope_options import RopeOptions


@dataclass(frozen=True)
class DecoderOptions:
    """The optional parts of a decoder's layers, and their numbers."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # whether query and key heads are normalised before rotation
    experts: ExpertOptions | None = None
    norm_offset: float = 0.0  # added to the weights of all RMS norms
    ropes: Sequence[RopeOptions | None] = ()  # by layer, None without RoPE; () for the config's
    interleaved: bool = False  # whether rotation pairs neighbouring dimensions
    attention_scale: float | None = None  # factor of scores; None for 1 / sqrt(head dim)
    soft_cap: float | None = None  # soft cap of attention scores
    has_sinks: bool = False  # whether each query head has an attention sink
    embedding_scale: float = 1.0  # factor of embedded tokens
    logits_scale: float = 1.0  # factor of logits, before the soft cap
    logits_soft_cap: float | None = None
