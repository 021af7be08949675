"""The families of GGUF architectures: metadata beyond the common sizes, converted to configs.

Values that a file omits are llama.cpp's defaults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.base.errors import ModelError
from quire.spec.gguf.deepseek import glm4_moe
from quire.spec.gguf.metadata import Metadata, layer_count, longrope, rope, turned_part
from quire.spec.layer_windows import FULL, FULL_INTERVAL, SLIDING
from quire.spec.linear_attention import LINEAR

Config = dict[str, Any]
GEMMA_WINDOW = 4096  # window of files without one
# Gemma's largest models scale scores by hidden_size / num_heads instead of head_dim. In files only
# the number of layers distinguishes these models.
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
RECURRENT = "attention.recurrent_layers"


def _nothing(meta: Metadata, sizes: Config) -> Config:
    return {}


@dataclass(frozen=True)
class Family:
    """One architecture: how to read its metadata."""

    model_type: str  # model type in the config
    own: Callable[[Metadata, Config], Config] = _nothing  # reads its own metadata, given the sizes
    queries: str = "attn_q"  # matrix of the queries, or of queries, keys and values
    fuses_gate: bool = False  # whether one matrix holds gate and up projection
    turns_part: bool = False  # whether only a part of each head is rotated
    reads_rope: Callable[[Metadata, int], Config] = rope  # given the number of rotated dimensions
    may_have_experts: bool = False
    is_hybrid: bool = False  # whether layers may have linear attention; queries then have gates
    eps: str = "attention.layer_norm_rms_epsilon"  # key of the norms' epsilon
    obeys: tuple[str, ...] = ()  # supported keys of WITHOUT_EFFECT (config.py)


def _llama(meta: Metadata, sizes: Config) -> Config:
    """Read Llama's own metadata. With a window the model is Mistral, with experts Mixtral."""
    key, found = "attention.sliding_window", {}
    if meta.has(key):
        found = {"model_type": "mistral", "sliding_window": meta.count(key)}
    if _num_experts(meta) == 0:
        return found
    experts = _experts(meta, sizes)
    inner = experts.pop("moe_intermediate_size")
    return found | experts | {"model_type": "mixtral", "intermediate_size": inner}


def _qwen3_moe(meta: Metadata, sizes: Config) -> Config:
    return _experts(meta, sizes) | {"norm_topk_prob": True}


def _qwen2_moe(meta: Metadata, sizes: Config) -> Config:
    """Read the experts, and the shared expert that all tokens pass."""
    first = meta.file.tensors.get("blk.0.ffn_gate_shexp.weight")
    shared = meta.count("expert_shared_feed_forward_length", 0 if first is None else first.shape[0])
    found = {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return _experts(meta, sizes) | found | {"qkv_bias": sizes["attention_bias"]}


def _gpt_oss(meta: Metadata, sizes: Config) -> Config:
    """Read the experts and windows. This family's yarn does not round the blending's ends."""
    experts = _experts(meta, sizes)
    inner = experts.pop("moe_intermediate_size")
    rope_parameters = sizes["rope_parameters"] | {"truncate": False}
    windows = _in_turn(meta, sizes, 2)
    return experts | windows | {"intermediate_size": inner, "rope_parameters": rope_parameters}


def _num_experts(meta: Metadata) -> int:
    return meta.count("expert_count", 0, minimum=0)


def _experts(meta: Metadata, sizes: Config) -> Config:
    """Read the experts that all layers have. Old files omit the size of an expert."""
    first = meta.file.tensors.get("blk.0.ffn_gate_exps.weight")
    inner = first.shape[1] if first is not None and len(first.shape) == 3 else 1
    inner = meta.count("expert_feed_forward_length", inner)
    num_experts, hidden = meta.count("expert_count"), sizes["hidden_size"]
    shape = {"ffn_gate_exps": (num_experts, inner, hidden)}
    meta.check_layers(range(sizes["num_hidden_layers"]), shape)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": inner,
    }


def _gemma2(meta: Metadata, sizes: Config) -> Config:
    return {
        "query_pre_attn_scalar": _gemma_scalar(sizes, GEMMA2_27B_LAYERS),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
        "tie_word_embeddings": True,
    } | _in_turn(meta, sizes, 2, GEMMA_WINDOW)


def _gemma3(meta: Metadata, sizes: Config) -> Config:
    """Read the windows and two rotary embeddings: the file's for full layers, one for sliding."""
    cap = meta.number("final_logit_softcapping", 0.0)
    found = {
        "query_pre_attn_scalar": _gemma_scalar(sizes, GEMMA3_27B_LAYERS),
        "final_logit_softcapping": cap or None,
        "rope_parameters": {
            FULL: sizes["rope_parameters"],
            SLIDING: {"rope_theta": meta.number("rope.freq_base_swa", 10000.0)},
        },
    }
    if meta.count("attention.sliding_window", 0, minimum=0) == 0:
        return found | {"layer_types": [FULL] * sizes["num_hidden_layers"]}
    return found | _in_turn(meta, sizes, 6)


def _gemma_scalar(sizes: Config, largest: int) -> int:
    if sizes["num_hidden_layers"] == largest:
        return int(sizes["hidden_size"] // sizes["num_attention_heads"])
    return int(sizes["head_dim"])


def _in_turn(
    meta: Metadata, sizes: Config, every: int, default_window: int | None = None
) -> Config:
    """Read which layers have a window.

    If the file does not list them, all layers have one except each layer whose number is a multiple
    of `every`."""
    key, num_layers = "attention.sliding_window_pattern", sizes["num_hidden_layers"]
    if meta.is_array(key):
        has_window = meta.flags(key)
        if len(has_window) != num_layers:
            raise meta.error(key, f"an array of {len(has_window)} for {num_layers} layers")
    else:
        every = meta.count(key, every)
        has_window = [(layer + 1) % every != 0 for layer in range(num_layers)]
    return {
        "sliding_window": meta.count("attention.sliding_window", default_window),
        "layer_types": [SLIDING if has else FULL for has in has_window],
    }


def _olmo2(meta: Metadata, sizes: Config) -> Config:
    key = "attention.sliding_window"  # set by OLMo 3, whose files have the same architecture name
    if meta.count(key, 0, minimum=0):
        raise meta.error(key, f"{meta.count(key)}; models of olmo2 have no windows here")
    return {}


def _granite(meta: Metadata, sizes: Config) -> Config:
    """Read the multipliers. llama.cpp's default scale of scores is 1 / sqrt(head dim)."""
    if not meta.flag("rope.scaling.finetuned", True):
        raise meta.error("rope.scaling.finetuned", "false; granite has a rotary embedding here")
    factors = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    found = {ours: meta.number(theirs, 1.0) or 1.0 for ours, theirs in factors.items()}
    scale = meta.number("attention.scale", 0.0) or sizes["head_dim"] ** -0.5
    return found | {"attention_multiplier": scale}


def _smollm3(meta: Metadata, sizes: Config) -> Config:
    return {"no_rope_layer_interval": 4}


def _cohere2(meta: Metadata, sizes: Config) -> Config:
    return {
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon"),
        "logit_scale": meta.number("logit_scale"),
    } | _in_turn(meta, sizes, 4)


def _phi3(meta: Metadata, sizes: Config) -> Config:
    """Read the window, which llama.cpp ignores, and the context length of the training."""
    window = meta.count("attention.sliding_window", 0, minimum=0)
    length = meta.count("rope.scaling.original_context_length", sizes["max_position_embeddings"])
    return {"sliding_window": window or None, "original_max_position_embeddings": length}


def _glm4(meta: Metadata, sizes: Config) -> Config:
    key = "rope.dimension_sections"
    if any(meta.flags(key)):
        raise meta.error(
            key, "of a model that reads images; only GLM 4 that reads text is supported"
        )
    return {}


def attending_layers(meta: Metadata, num_layers: int) -> list[int]:
    """Return the layers with softmax attention; the others have linear attention."""
    if not meta.is_array(RECURRENT):
        every = meta.count("full_attention_interval", FULL_INTERVAL)
        return [layer for layer in range(num_layers) if (layer + 1) % every == 0]
    is_linear = meta.flags(RECURRENT)
    if len(is_linear) < num_layers:
        raise meta.error(RECURRENT, f"an array of {len(is_linear)} for {num_layers} layers")
    return [layer for layer in range(num_layers) if not is_linear[layer]]


def linear_attention(meta: Metadata, sizes: dict[str, Any]) -> dict[str, Any]:
    """Read the kinds of layers and the sizes of linear attention; check them against matrices."""
    num_layers, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    attending = attending_layers(meta, num_layers)
    key_dim, key_heads = meta.count("ssm.state_size"), meta.count("ssm.group_count")
    inner, value_heads = meta.count("ssm.inner_size"), meta.count("ssm.time_step_rank")
    width = meta.count("ssm.conv_kernel")
    if inner % value_heads:
        raise meta.error("ssm.inner_size", f"{inner}, not a multiple of {value_heads} heads")
    linear = [layer for layer in range(num_layers) if layer not in attending]
    channels = 2 * key_dim * key_heads + inner
    meta.check_layers(linear, {"ssm_out": (hidden, inner), "ssm_conv1d": (channels, width)})
    return {
        "layer_types": [FULL if layer in attending else LINEAR for layer in range(num_layers)],
        "linear_key_head_dim": key_dim,
        "linear_num_key_heads": key_heads,
        "linear_value_head_dim": inner // value_heads,
        "linear_num_value_heads": value_heads,
        "linear_conv_kernel_dim": width,
    }


def _qwen3_next(meta: Metadata, sizes: Config) -> Config:
    found = {"norm_topk_prob": True} | linear_attention(meta, sizes)
    return _qwen3_5_moe(meta, sizes) | found


def _qwen3_5_moe(meta: Metadata, sizes: Config) -> Config:
    """Read the experts, the shared expert that all tokens pass, and linear attention."""
    shared = meta.count("expert_shared_feed_forward_length")
    experts = _experts(meta, sizes) | {"shared_expert_intermediate_size": shared}
    return experts | linear_attention(meta, sizes)


def _gpt_neox(meta: Metadata, sizes: Config) -> Config:
    return {
        "layer_norm_eps": meta.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": meta.flag("use_parallel_residual", True),
    }


FAMILIES = {
    "llama": Family("llama", _llama, may_have_experts=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "qwen2moe": Family("qwen2_moe", _qwen2_moe, may_have_experts=True),
    "gpt-oss": Family("gpt_oss", _gpt_oss, may_have_experts=True),
    "qwen3moe": Family("qwen3_moe", _qwen3_moe, may_have_experts=True),
    "gemma2": Family(
        "gemma2", _gemma2, obeys=("attn_logit_softcapping", "final_logit_softcapping")
    ),
    "gemma3": Family("gemma3_text", _gemma3, obeys=("final_logit_softcapping",)),
    "olmo2": Family("olmo2", _olmo2),
    "granite": Family(
        "granite", _granite, obeys=("logit_scale", "residual_scale", "embedding_scale")
    ),
    "smollm3": Family("smollm3", _smollm3),
    "cohere2": Family(
        "cohere2", _cohere2, eps="attention.layer_norm_epsilon", obeys=("logit_scale",)
    ),
    "glm4": Family("glm4", _glm4, fuses_gate=True, turns_part=True),
    "glm4moe": Family("glm4_moe", glm4_moe, turns_part=True, may_have_experts=True),
    "qwen3next": Family(
        "qwen3_next", _qwen3_next, turns_part=True, may_have_experts=True, is_hybrid=True
    ),
    "qwen35": Family("qwen3_5_text", linear_attention, turns_part=True, is_hybrid=True),
    "qwen35moe": Family(
        "qwen3_5_moe_text", _qwen3_5_moe, turns_part=True, may_have_experts=True, is_hybrid=True
    ),
    "gptneox": Family(
        "gpt_neox",
        _gpt_neox,
        queries="attn_qkv",
        turns_part=True,
        eps="attention.layer_norm_epsilon",
    ),
    "phi3": Family(
        "phi3", _phi3, queries="attn_qkv", fuses_gate=True, turns_part=True, reads_rope=longrope
    ),
}


def decoder(meta: Metadata, family: Family) -> Config:
    """Return the config of an architecture with rotary attention."""
    sizes = _sizes(meta, family)
    first = next(iter(_attending(meta, family, sizes["num_hidden_layers"])), 0)
    biases = {
        "attention_bias": f"blk.{first}.{family.queries}.bias",
        "mlp_bias": "blk.0.ffn_up.bias",
    }
    config = sizes | {name: tensor in meta.file.tensors for name, tensor in biases.items()}
    config |= {"model_type": family.model_type, "rms_norm_eps": meta.number(family.eps)}
    return config | family.own(meta, config)


def _attending(meta: Metadata, family: Family, num_layers: int) -> Sequence[int]:
    return attending_layers(meta, num_layers) if family.is_hybrid else range(num_layers)


def _sizes(meta: Metadata, family: Family) -> Config:
    """Read the sizes and the rotary embedding, and check them against the matrices' shapes."""
    heads, hidden = meta.count("attention.head_count"), meta.count("embedding_length")
    kv_heads = meta.count("attention.head_count_kv", heads)
    num_layers = layer_count(meta)
    num_experts = _num_experts(meta)
    # The file may omit this length if all layers have experts.
    inner = meta.count("feed_forward_length", 1 if family.is_hybrid and num_experts else None)
    head_dim = meta.count("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        found, may_differ = meta.count(key, head_dim), family.turns_part and key.startswith("rope")
        if found != head_dim and not may_differ:
            reason = f"{found}, but heads have {head_dim} dimensions"
            raise meta.error(key, f"{reason}; models where these differ are not supported")
    rotated = meta.count("rope.dimension_count", head_dim)
    rope_parameters = family.reads_rope(meta, rotated)
    if family.turns_part:
        rope_parameters["partial_rotary_factor"] = turned_part(rotated, head_dim)
    if rotated > head_dim:
        raise meta.error("rope.dimension_count", f"{rotated}, but heads have {head_dim} dimensions")
    if heads % kv_heads or rotated % 2:
        raise ModelError(
            f"{meta.file.path} has {heads} query heads of {head_dim} dimensions, and {kv_heads}"
            " KV heads: query heads must be a multiple of KV heads, and dimensions even."
        )
    both = family.queries == "attn_qkv"
    rows = (heads * (2 if family.is_hybrid else 1) + 2 * kv_heads * both) * head_dim
    if num_experts and not family.may_have_experts:
        raise meta.error(
            "expert_count", f"{num_experts}; such a mixture of experts is not supported"
        )
    meta.check_layers(_attending(meta, family, num_layers), {family.queries: (rows, hidden)})
    if not num_experts:
        shape = (inner * (2 if family.fuses_gate else 1), hidden)
        meta.check_layers(range(num_layers), {"ffn_up": shape})
    return {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": meta.count("context_length"),
        "rope_parameters": rope_parameters,
    }
