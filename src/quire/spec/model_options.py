"""A model's layer options beyond sizes, read from the config with transformers' rules.

This covers the architectures that quire runs. A field that transformers supports and quire does not
is rejected, so that no model computes something its authors did not mean.
"""

from dataclasses import dataclass, replace

from quire.base.errors import ModelError
from quire.spec.config_fields import Fields
from quire.spec.cuts import cut_evenly
from quire.spec.deepseek.routing import CHOSEN, ROUTED_TYPES, Routing, dense_layers, read_routing
from quire.spec.encoders import ENCODER_TYPES, MODERNBERT
from quire.spec.linear_attention import HYBRID_TYPES

# Rotary types whose options this file reads. Most other types read theirs in the model's own file.
ROTARY_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
MAX_EXPERTS = 1 << 14
MAX_EXPERT_LAYERS = 1 << 17  # limit for the experts of all layers together
# Name and default of the activation's field, for types without hidden_act and silu.
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
SILU = ("silu", "swish")  # activations of experts, and of convolutions in linear attention
# Defaults of types with experts: number of experts, experts per token, and size of an expert; None
# if experts have intermediate_size.
EXPERTS: dict[str, tuple[int, int, int | None]] = {
    "qwen2_moe": (60, 4, 1408),
    "qwen3_moe": (128, 8, 768),
    "mixtral": (8, 2, None),
    "gpt_oss": (128, 4, None),
    "llama4_text": (16, 1, None),
    "qwen3_next": (512, 10, 512),
    "qwen3_5_moe_text": (256, 8, 512),
}
# Types whose config has one name for the number; types with a shared expert. Types with experts in
# all layers, whose weights add up to 1.
WITH_ONE_NAME = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
WITH_SHARED = WITH_ONE_NAME
ALWAYS_SPARSE = ("qwen3_5_moe_text",)


@dataclass(frozen=True)
class LayerOptions:
    """The options of a decoder layer. Biases apply only if the architecture leaves them open."""

    norm_eps: float  # epsilon added to the (mean) square
    activation: str
    attention_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True)
class GPT2Options:
    """The options of GPT-2's attention."""

    scales_attention: bool  # whether scores are scaled by 1 / sqrt(head dim)
    scales_by_layer: bool  # whether scores are also scaled by 1 / (layer + 1)


@dataclass(frozen=True)
class OPTOptions:
    """The options of OPT."""

    width: int  # size of embeddings before their projection
    has_biases: bool
    has_affine_norms: bool
    norms_first: bool  # whether norms come before attention and feed-forward layer
    has_final_norm: bool


@dataclass(frozen=True)
class ExpertOptions:
    """The options of a mixture of experts."""

    num_experts: int
    num_chosen: int  # experts per token
    inner_size: int  # size of one expert's feed-forward layer
    normalises: bool  # whether the weights of a token's experts add up to 1
    step: int = 1  # every step-th layer has experts
    dense_layers: tuple[int, ...] = ()  # layers without experts in spite of `step`
    shared_size: int = 0  # size of the shared expert, which all tokens pass; 0 for none
    routing: Routing | None = None  # None for the largest logits, without groups
    has_shared_gate: bool = True  # whether a gate scales the shared expert's output

    @property
    def token_size(self) -> int:
        """Return the size of all feed-forward layers that one token passes."""
        return self.num_chosen * self.inner_size + self.shared_size

    def is_sparse(self, layer: int) -> bool:
        """Return whether this layer has experts."""
        return layer not in self.dense_layers and (layer + 1) % self.step == 0

    def of_ranks(self, num_ranks: int, *, whole: bool = False) -> "ExpertOptions":
        """Return one rank's options: a part of each expert, or some whole experts if `whole`.

        Raises ConfigError if shares cannot be equal."""
        inner = self.inner_size
        if whole:
            cut_evenly(self.num_experts, 0, num_ranks, NUM_EXPERTS)
        else:
            inner = cut_evenly(inner, 0, num_ranks, INNER_SIZE).count
        shared = cut_evenly(self.shared_size, 0, num_ranks, SHARED_SIZE)
        return replace(self, inner_size=inner, shared_size=shared.count)

    def activations(self, size: int) -> int:
        """Return an upper bound on a layer's activations per token, in elements.

        size: the hidden size. Counts each expert's inputs, products and outputs, which are float32,
        their sums, and the router's."""
        inner = self.inner_size + self.shared_size
        of_experts = self.num_chosen * (6 * self.inner_size + 2 * size)
        return of_experts + 3 * inner + 8 * size + 8 * self.num_experts


def layer_options(fields: Fields, model_type: str) -> LayerOptions:
    """Read the layers' options. Raises ModelError for an invalid field; so do the others."""
    if model_type == "gpt2":
        eps = fields.number("layer_norm_epsilon", 1e-5, above=False)
    elif model_type == "opt":
        eps = 1e-5  # torch's default, which transformers uses
    elif model_type in ENCODER_TYPES:
        name, default = ("norm_eps", 1e-5) if model_type == MODERNBERT else NORM_OF_BERT
        eps = fields.number(name, default, above=False)
    else:
        eps = fields.number("rms_norm_eps", 1e-6, above=False)
    has_bias = model_type not in ("mistral", "qwen2")  # fixed by these architectures
    return LayerOptions(
        norm_eps=eps,
        activation=fields.text(*_activation_field(model_type)),
        attention_bias=has_bias and fields.flag("attention_bias"),
        mlp_bias=model_type not in ROTARY_TYPES[1:] and fields.flag("mlp_bias"),
    )


def check_activation(layers: LayerOptions, model_type: str) -> None:
    """Raise ModelError if quire does not support the activation in this model type."""
    silu_alone = model_type in (*EXPERTS, *ROUTED_TYPES, *HYBRID_TYPES)
    known: tuple[str, ...] = SILU if silu_alone else GATES
    if model_type in UNGATED_TYPES:
        known = ACTIVATIONS
    field, _ = _activation_field(model_type)
    if layers.activation not in known and model_type != "gpt_oss":  # has its own gate
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
    """Read the experts; None if no layer has any. Raises ModelError.

    The number is num_experts in checkpoints on the hub, num_local_experts in transformers 5.
    """
    if model_type in ROUTED_TYPES:
        return _routed_options(fields, model_type, num_layers)
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
    num_chosen = fields.integer("num_experts_per_tok", default=num_chosen, minimum=0)
    if model_type == "llama4_text":
        options = _llama4_experts(fields, num_experts, num_chosen, num_layers)
    elif inner is None:
        options = ExpertOptions(num_experts, num_chosen, fields.integer("intermediate_size"), True)
    else:
        options = ExpertOptions(
            num_experts,
            num_chosen,
            inner_size=fields.integer("moe_intermediate_size", default=inner, minimum=0),
            normalises=always or fields.flag("norm_topk_prob"),
            step=1 if always else fields.integer("decoder_sparse_step", default=1, minimum=0),
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


def _llama4_experts(
    fields: Fields, num_experts: int, num_chosen: int, num_layers: int
) -> ExpertOptions:
    """Read Llama 4's experts. `moe_layers` lists the layers that have any; without it, these are
    every `interleave_moe_layer_step`-th. The shared expert has the size of the others."""
    if num_chosen != 1:
        raise fields.error(
            "num_experts_per_tok",
            "only one expert per token is supported for llama4_text",
        )
    inner, sparse = fields.integer("intermediate_size"), fields.integers("moe_layers")
    dense = tuple(layer for layer in range(num_layers) if layer not in sparse)
    is_listed, step = fields.has("moe_layers"), fields.integer("interleave_moe_layer_step")
    return ExpertOptions(
        num_experts,
        num_chosen,
        inner,
        normalises=True,
        step=1 if is_listed else step,
        dense_layers=dense if is_listed else (),
        shared_size=inner,
        has_shared_gate=False,
    )


def _routed_options(fields: Fields, model_type: str, num_layers: int) -> ExpertOptions:
    """Read the experts of DeepSeek's models and of models that are made like them."""
    other = "num_local_experts" if ROUTED_TYPES[model_type] else "num_experts"
    name = other if other in fields.names() else "n_routed_experts"
    num_experts = fields.integer(name, maximum=min(MAX_EXPERTS, MAX_EXPERT_LAYERS // num_layers))
    if {name, "n_routed_experts"} <= {*fields.names()} and (
        fields.integer("n_routed_experts") != num_experts
    ):
        raise fields.error(other, "but n_routed_experts, another name for it, differs")
    num_chosen = fields.integer(CHOSEN)
    if num_chosen > num_experts:
        raise fields.error(CHOSEN, f"it must be at most {name}, {num_experts}")
    inner = fields.integer(INNER_SIZE)
    routing, normalises = read_routing(fields, model_type, num_experts, num_chosen)
    return ExpertOptions(
        num_experts,
        num_chosen,
        inner,
        normalises,
        dense_layers=dense_layers(fields, model_type, num_layers),
        shared_size=inner * fields.integer("n_shared_experts", maximum=MAX_EXPERTS),
        routing=routing,
    )


def _num_experts(fields: Fields, model_type: str, default: int) -> int:
    """Read the number of experts, which has two names in some types."""
    names = ("num_experts", "num_local_experts")[: 1 if model_type in WITH_ONE_NAME else 2]
    counts = [fields.integer(n, default=default, minimum=0, maximum=MAX_EXPERTS) for n in names]
    if all(map(fields.has, names)) and counts[0] != counts[-1]:
        raise fields.error(names[0], f"but num_local_experts, another name for it, is {counts[1]}")
    return counts[0] if fields.has(names[0]) else counts[-1]


def _shared_size(fields: Fields, model_type: str) -> int:
    if model_type not in WITH_SHARED:
        return 0
    return fields.integer(SHARED_SIZE)


def refuse_what_is_ignored(fields: Fields, model_type: str) -> None:
    """Raise ModelError for fields that transformers supports and quire ignores, and for fields that
    contradict the architecture."""
    if model_type in HYBRID_TYPES and not fields.flag("attn_output_gate", True):
        raise fields.error("attn_output_gate", f"attention of {model_type} always has a gate")
    if model_type == "gpt2" and fields.flag("add_cross_attention"):
        raise fields.error("add_cross_attention", "models with an encoder are not supported")
    if fields.value("per_layer_config"):
        raise fields.error("per_layer_config", "layers with their own configs are not supported")
