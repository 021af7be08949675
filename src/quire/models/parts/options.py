"""What the decoders of Llama's kind differ in, where that is a number or a switch. What differs in
structure is a layer class of the model's own file."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.spec.model_options import ExpertOptions
from quire.spec.rope_options import RopeOptions


@dataclass(frozen=True)
class DecoderOptions:
    """Which optional parts the layers have, and their numbers.

    qk_norm: query and key heads are normalised before they are turned. norm_offset: what is added
    to the weights of all RMS norms. ropes: the rotary embedding of each layer, None where a layer
    has none; () is the config's for all. interleaved: rotation pairs neighbours. attention_scale:
    of scores; None is 1 / sqrt(head dim). soft_cap: of scores. has_sinks: each query head has a
    logit that no token owns. embedding_scale, logits_scale: factors on the embedded tokens and on
    logits. logits_soft_cap: after that.
    """

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertOptions | None = None
    norm_offset: float = 0.0
    ropes: Sequence[RopeOptions | None] = ()
    interleaved: bool = False
    attention_scale: float | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
