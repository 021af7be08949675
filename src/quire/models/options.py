"""What the decoders of Llama's kind differ in. No torch: outlines are made of it, too."""

from dataclasses import dataclass

from quire.base.errors import ModelError
from quire.base.model_spec import ModelSpec


@dataclass(frozen=True)
class ExpertOptions:
    """Of a mixture of experts.

    num_chosen: experts that a token is sent to. inner_size: of one expert's feed-forward layer.
    normalises: whether the weights of the chosen add up to 1. step, dense_layers: every step-th
    layer has experts, but for these.
    """

    num_experts: int
    num_chosen: int
    inner_size: int
    normalises: bool
    step: int = 1
    dense_layers: tuple[int, ...] = ()

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.step == 0

    def activations(self, size: int) -> int:
        """Upper bound of the elements that a layer makes of a token of so many: each expert's
        product and output, the inputs of one expert, sums in float32, and the router's."""
        inner = self.inner_size
        return self.num_chosen * (inner + size) + 3 * inner + 8 * size + 8 * self.num_experts


@dataclass(frozen=True)
class DecoderOptions:
    """Which optional parts the layers have."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertOptions | None = None


def expert_options(spec: ModelSpec) -> ExpertOptions | None:
    """None if no layer has experts. Raises ModelError for numbers that cannot be.

    Checkpoints on the hub say num_experts, those that transformers 5 writes num_local_experts.
    """
    raw = spec.raw
    num_experts = int(raw.get("num_experts", raw.get("num_local_experts", 128)))
    if spec.model_type != "qwen3_moe" or num_experts == 0:
        return None
    options = ExpertOptions(
        num_experts,
        num_chosen=int(raw.get("num_experts_per_tok", 8)),
        inner_size=int(raw.get("moe_intermediate_size", 768)),
        normalises=bool(raw.get("norm_topk_prob", False)),
        step=int(raw.get("decoder_sparse_step", 1)),
        dense_layers=tuple(raw.get("mlp_only_layers") or ()),
    )
    if not 1 <= options.num_chosen <= num_experts:
        raise ModelError(
            f"config.json sends a token to {options.num_chosen} of {num_experts} experts:"
            " num_experts_per_tok must be from 1 to num_experts."
        )
    if options.step < 1 or options.inner_size < 1:
        raise ModelError(
            "config.json has a decoder_sparse_step or moe_intermediate_size below 1:"
            f" {options.step} and {options.inner_size}."
        )
    return options
