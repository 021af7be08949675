"""What a config says about a model's layers beside their sizes, as transformers reads it.

Of the architectures that we know. A field that transformers obeys and we do not is refused, so that
no model computes something else than its authors mean.
"""

from dataclasses import dataclass, replace

from quire.base.errors import ModelError
from quire.spec.config_fields import Fields
from quire.spec.cuts import cut_evenly
from quire.spec.encoders import ENCODER_TYPES, MODERNBERT
from quire.spec.linear_attention import HYBRID_TYPES

# The rotary types whose options are read here; most others read theirs in their model's file.
ROTARY_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
MAX_EXPERTS = 1 << 14
MAX_EXPERT_LAYERS = 1 << 17  # experts of all layers together
# The field of the activation, and what it is without, where that is not hidden_act and silu.
ACTIVATION_FIELDS = {
    "gpt2": ("activation_function", "gelu_new"),
    "opt": ("activation_function", "relu"),
    "gpt_neox": ("hidden_act", "gelu"),
    "gemma2": ("hidden_activation", "gelu_pytorch_tanh"),
    "gemma3_text": ("hidden_activation", "gelu_pytorch_tanh"),
    **dict.fromkeys(ENCODER_TYPES, ("hidden_act", "gelu")),
    MODERNBERT: ("hidden_activation", "gelu"),
}
UNGATED_TYPES = ("gpt2", "opt", "gpt_neox", *ENCODER_TYPES[:-1])
NORM_OF_BERT = ("layer_norm_eps", 1e-12)
ACTIVATIONS = ("gelu", "gelu_python", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu")
GATES = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh")
INNER_SIZE, SHARED_SIZE = "moe_intermediate_size", "shared_expert_intermediate_size"
NUM_EXPERTS = "num_experts (num_local_experts)"
SILU = ("silu", "swish")  # of experts, and of what linear attention convolves
# Of types with experts: their number, those of a token and the size of each, where a config does
# not say it; experts without an own size have intermediate_size.
EXPERTS: dict[str, tuple[int, int, int | None]] = {
    "qwen2_moe": (60, 4, 1408),
    "qwen3_moe": (128, 8, 768),
    "mixtral": (8, 2, None),
    "gpt_oss": (128, 4, None),
    "qwen3_next": (512, 10, 512),
    "qwen3_5_moe_text": (256, 8, 512),
}
# Of them: those whose config has one name for the number, those with an expert that all tokens are
# sent to, and those all of whose layers have experts, whose weights add up to 1.
WITH_ONE_NAME = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
WITH_SHARED = WITH_ONE_NAME
ALWAYS_SPARSE = ("qwen3_5_moe_text",)


@dataclass(frozen=True)
class LayerOptions:
    """norm_eps: what norms add to the (mean) square. Biases are those of attention and of the
    feed-forward layer, where the architecture leaves them open."""

    norm_eps: float
    activation: str
    attention_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True)
class GPT2Options:
    """scales_attention: by 1 / sqrt(head dim). scales_by_layer: also by 1 / (layer + 1)."""

    scales_attention: bool
    scales_by_layer: bool


@dataclass(frozen=True)
class OPTOptions:
    """width: of embeddings, before a projection. norms_first: before attention and feed-forward
    layer instead of after."""

    width: int
    has_biases: bool
    has_affine_norms: bool
    norms_first: bool
    has_final_norm: bool


@dataclass(frozen=True)
class ExpertOptions:
    """Of a mixture of experts.

    num_chosen: experts that a token is sent to. inner_size: of one expert's feed-forward layer.
    normalises: whether the weights of the chosen add up to 1. step, dense_layers: every step-th
    layer has experts, but for these. shared_size: of an expert that all tokens are sent to; 0
    where there is none."""

    num_experts: int
    num_chosen: int
    inner_size: int
    normalises: bool
    step: int = 1
    dense_layers: tuple[int, ...] = ()
    shared_size: int = 0

    @property
    def token_size(self) -> int:
        """Return the size of the feed-forward layers that a token goes through."""
        return self.num_chosen * self.inner_size + self.shared_size

    def is_sparse(self, layer: int) -> bool:
        """Tell whether this layer has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.step == 0

    def of_ranks(self, num_ranks: int, *, whole: bool = False) -> "ExpertOptions":
        """Return those of each of so many ranks, with a part of each expert, or with some whole
        ones. Raises ConfigError where parts cannot be equal."""
        inner = self.inner_size
        if whole:
            cut_evenly(self.num_experts, 0, num_ranks, NUM_EXPERTS)
        else:
            inner = cut_evenly(inner, 0, num_ranks, INNER_SIZE).count
        shared = cut_evenly(self.shared_size, 0, num_ranks, SHARED_SIZE)
        return replace(self, inner_size=inner, shared_size=shared.count)

    def activations(self, size: int) -> int:
        """Bound the elements that a layer makes of a token of so many: each expert's inputs,
        products and outputs, which the core keeps in float32, sums, and the router's."""
        inner = self.inner_size + self.shared_size
        of_experts = self.num_chosen * (6 * self.inner_size + 2 * size)
        return of_experts + 3 * inner + 8 * size + 8 * self.num_experts


def layer_options(fields: Fields, model_type: str) -> LayerOptions:
    """Read what layers are made of. Raises ModelError for a field that cannot be; so do the
    others."""
    if model_type == "gpt2":
        eps = fields.number("layer_norm_epsilon", 1e-5, above=False)
    elif model_type == "opt":
        eps = 1e-5  # transformers leaves it to torch
    elif model_type in ENCODER_TYPES:
        name, default = ("norm_eps", 1e-5) if model_type == MODERNBERT else NORM_OF_BERT
        eps = fields.number(name, default, above=False)
    else:
        eps = fields.number("rms_norm_eps", 1e-6, above=False)
    has_bias = model_type not in ("mistral", "qwen2")  # of these the architecture says it
    return LayerOptions(
        norm_eps=eps,
        activation=fields.text(*_activation_field(model_type)),
        attention_bias=has_bias and fields.flag("attention_bias"),
        mlp_bias=model_type not in ROTARY_TYPES[1:] and fields.flag("mlp_bias"),
    )


def check_activation(layers: LayerOptions, model_type: str) -> None:
    """Raise ModelError if no feed-forward layer here has this function."""
    silu_alone = model_type in EXPERTS or model_type in HYBRID_TYPES
    known: tuple[str, ...] = SILU if silu_alone else GATES
    if model_type in UNGATED_TYPES:
        known = ACTIVATIONS
    field, _ = _activation_field(model_type)
    if layers.activation not in known and model_type != "gpt_oss":  # has a gate of its own
        raise ModelError(
            f"model_type {model_type} with {field} {layers.activation!r} is not supported;"
            f" supported are {', '.join(known)}."
        )


def _activation_field(model_type: str) -> tuple[str, str]:
    return ACTIVATION_FIELDS.get(model_type, ("hidden_act", "silu"))


def gpt2_options(fields: Fields) -> GPT2Options:
    return GPT2Options(
        scales_attention=fields.flag("scale_attn_weights", True),
        scales_by_layer=fields.flag("scale_attn_by_inverse_layer_idx"),
    )


def opt_options(fields: Fields, hidden_size: int) -> OPTOptions:
    norms_first = fields.flag("do_layer_norm_before", True)
    return OPTOptions(
        width=fields.integer("word_embed_proj_dim", default=hidden_size),
        has_biases=fields.flag("enable_bias", True),
        has_affine_norms=fields.flag("layer_norm_elementwise_affine", True),
        norms_first=norms_first,
        has_final_norm=norms_first and not fields.flag("_remove_final_layer_norm"),
    )


def expert_options(fields: Fields, model_type: str, num_layers: int) -> ExpertOptions | None:
    """Read the experts; None if no layer has any.

    Checkpoints on the hub say num_experts, those that transformers 5 writes num_local_experts."""
    if model_type not in EXPERTS:
        return None
    count, num_chosen, inner = EXPERTS[model_type]
    num_experts = _num_experts(fields, model_type, count)
    always = model_type in ALWAYS_SPARSE
    if num_experts == 0:
        if inner is not None and not always:
            return None
        name = "num_experts" if model_type in WITH_ONE_NAME else "num_local_experts"
        raise fields.error(name, f"{model_type} has experts in all layers")
    if num_experts * num_layers > MAX_EXPERT_LAYERS:
        raise fields.error(
            "num_experts" if fields.has("num_experts") else "num_local_experts",
            f"with {num_layers} layers that is more than {MAX_EXPERT_LAYERS} experts",
        )
    num_chosen = fields.integer("num_experts_per_tok", default=num_chosen, least=0)
    if inner is None:
        options = ExpertOptions(num_experts, num_chosen, fields.integer("intermediate_size"), True)
    else:
        options = ExpertOptions(
            num_experts,
            num_chosen,
            inner_size=fields.integer("moe_intermediate_size", default=inner, least=0),
            normalises=always or fields.flag("norm_topk_prob"),
            step=1 if always else fields.integer("decoder_sparse_step", default=1, least=0),
            dense_layers=() if always else fields.integers("mlp_only_layers"),
            shared_size=_shared_size(fields, model_type),
        )
    if not 1 <= options.num_chosen <= num_experts:
        raise fields.error(
            "num_experts_per_tok",
            f"it sends a token to {options.num_chosen} of {num_experts} experts, but must be from 1"
            " to num_experts (num_local_experts)",
        )
    if options.step < 1 or options.inner_size < 1:
        raise fields.error(
            "decoder_sparse_step" if options.step < 1 else "moe_intermediate_size",
            "decoder_sparse_step or moe_intermediate_size is below 1:"
            f" {options.step} and {options.inner_size}",
        )
    return options


def _num_experts(fields: Fields, model_type: str, default: int) -> int:
    """Read it, which has two names in some types."""
    names = ("num_experts", "num_local_experts")[: 1 if model_type in WITH_ONE_NAME else 2]
    counts = [fields.integer(n, default=default, least=0, most=MAX_EXPERTS) for n in names]
    if all(map(fields.has, names)) and counts[0] != counts[-1]:
        raise fields.error(names[0], f"but num_local_experts, another name for it, is {counts[1]}")
    return counts[0] if fields.has(names[0]) else counts[-1]


def _shared_size(fields: Fields, model_type: str) -> int:
    if model_type not in WITH_SHARED:
        return 0
    return fields.integer(SHARED_SIZE)


def refuse_what_is_ignored(fields: Fields, model_type: str) -> None:
    """Raise ModelError for what transformers obeys and no model here does, and for what a config
    says that its architecture cannot be."""
    if model_type in HYBRID_TYPES and not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", f"attention of {model_type} always has a gate")
    if model_type == "gpt2" and fields.flag("add_cross_attention"):
        raise fields.error("add_cross_attention", "models with an encoder are not supported")
    if fields.value("per_layer_config"):
        raise fields.error("per_layer_config", "layers with their own configs are not supported")
