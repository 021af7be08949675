"""Names in GGUF files, by the model_type of the checkpoint: tensors, metadata, and the order of
rows. They come from llama.cpp's converter, not from our reader."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Config = Mapping[str, Any]

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "glm4_moe": "glm4moe",
}
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps",
    "block_sparse_moe.experts.w2": "ffn_down_exps",
    "mlp.router": "ffn_gate_inp",
    # Qwen 3 Next and Qwen 3.5
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    # DeepSeek, GLM 4.5 and MiniCPM 3
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    # layers for multi-token prediction
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
    # GPT-2
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    # GPT-NeoX
    "gpt_neox.embed_in": "token_embd",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
WITHOUT_KIND = {
    "sinks": "attn_sinks.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "e_score_correction_bias": "exp_probs_b.bias",
}
AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA = AFTER | {"pre_feedforward_layernorm": "ffn_norm"}
OWN_NAMES: dict[str, dict[str, str]] = {
    "olmo2": AFTER,
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm"},
    **{kind: {"post_attention_layernorm": "post_attention_norm"} for kind in (*HYBRID, "glm4_moe")},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
}
KEYS = {
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
}
# Those of one type, by the config's names.
OWN_KEYS: dict[str, dict[str, str]] = {
    "mistral": {"sliding_window": "attention.sliding_window"},
    "mixtral": {"sliding_window": "attention.sliding_window"},
    "qwen2_moe": {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    "gpt_oss": {
        "sliding_window": "attention.sliding_window",
        "intermediate_size": "expert_feed_forward_length",
    },
    "gemma2": {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3_text": {
        "sliding_window": "attention.sliding_window",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "granite": {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    },
    "cohere2": {"sliding_window": "attention.sliding_window", "logit_scale": "logit_scale"},
    "gpt_neox": {"use_parallel_residual": "use_parallel_residual"},
    **{
        kind: {
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_key_head_dim": "ssm.state_size",
            "linear_num_key_heads": "ssm.group_count",
            "linear_num_value_heads": "ssm.time_step_rank",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        }
        for kind in HYBRID
    },
}
IN_ONE = "kv_b_in_one"  # field of a test's config: write a file of llama.cpp before April 2025
SPLIT_HEADS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
ROUTED = (*SPLIT_HEADS, "glm4_moe")
LATENT = (*SPLIT_HEADS, "minicpm3")
PERMUTED = ("llama", "mistral", "mixtral", "granite", "smollm3")
PATTERNS = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6, "cohere2": 4}
TURN_PARTS = ("phi3", "glm4", "glm4_moe", "gpt_neox", *HYBRID)


def metadata(config: Config) -> dict[str, Any]:
    """Of the model, each key without the architecture in front."""
    kind = config["model_type"]
    found: dict[str, Any] = {}
    for key, names in KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            found[key] = value
    for name, key in OWN_KEYS.get(kind, {}).items():
        if config.get(name) is not None:
            found[key] = config[name]
    hidden = found["embedding_length"]
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    found["feed_forward_length"] = inner
    if kind in HYBRID:
        found |= _linear(config)
    if kind in ROUTED:
        found |= _routed(config)
    if kind in LATENT:
        found.pop("attention.value_length", None)  # head_dim is another size here
        found |= _latent(config)
    if kind in PATTERNS:
        found |= _pattern(config, PATTERNS[kind])
    if kind != "gpt2":
        found |= _rope(config)
    return found


def _routed(config: Config) -> dict[str, Any]:
    dense = config.get("first_k_dense_replace", 0)
    found = {
        "leading_dense_block_count": dense,
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_gating_func": 1 if config["model_type"] == "deepseek_v2" else 2,
    }
    if config.get("norm_topk_prob"):
        found["expert_weights_norm"] = True
    if config.get("n_group") is not None:
        found["expert_group_count"] = config["n_group"]
        found["expert_group_used_count"] = config["topk_group"]
    return found


def _latent(config: Config) -> dict[str, Any]:
    """Lengths: of DeepSeek's files those of one KV head, the compressed vector, and of its heads
    besides; of MiniCPM's only those of a head's query."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    query = config["qk_nope_head_dim"] + rotated
    found = {"attention.kv_lora_rank": rank, "rope.dimension_count": rotated}
    if config.get("q_lora_rank") is not None:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if config["model_type"] == "minicpm3":
        return found | {"attention.key_length": query}
    if config.get(IN_ONE):
        return found | {
            "attention.key_length": query,
            "attention.value_length": config["v_head_dim"],
        }
    found |= {"attention.head_count_kv": 1, "attention.key_length": rank + rotated}
    found |= {"attention.value_length": rank, "attention.key_length_mla": query}
    return found | {"attention.value_length_mla": config["v_head_dim"]}


def _pattern(config: Config, every: int) -> dict[str, Any]:
    """The converter leaves it out where it is the usual one; llama.cpp reads it."""
    kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
    usual = [(layer + 1) % every != 0 for layer in range(len(kinds))]
    return {} if kinds == usual else {"attention.sliding_window_pattern": kinds}


def _linear(config: Config) -> dict[str, Any]:
    """The converter writes an interval of 4 where the config has none, and the kinds beside it."""
    kinds = [kind == "linear_attention" for kind in config["layer_types"]]
    inner = config["linear_value_head_dim"] * config["linear_num_value_heads"]
    found = {"full_attention_interval": 4, "attention.recurrent_layers": kinds}
    if config["model_type"] != "qwen3_next":
        sections = config["rope_parameters"].get("mrope_section", [11, 11, 10])
        found["rope.dimension_sections"] = [*sections, 0]
    return found | {"ssm.inner_size": inner}


def _rope(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    found: dict[str, Any] = {}
    if "sliding_attention" in rope:
        found["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    rope = rope.get("full_attention", rope)
    found["rope.freq_base"] = float(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type") in ("linear", "yarn"):
        found["rope.scaling.type"] = rope["rope_type"]
        found["rope.scaling.factor"] = float(rope["factor"])
    if rope.get("rope_type") == "yarn":
        length = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = length
        if rope.get("mscale_all_dim") is not None:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    if config["model_type"] in TURN_PARTS:
        part = rope.get("partial_rotary_factor", 1.0)
        found["rope.dimension_count"] = int(part * head_dim(config))
    if config["model_type"] == "phi3":
        found["attention.sliding_window"] = config.get("sliding_window") or 0
        length, trained = (
            config["max_position_embeddings"],
            config["original_max_position_embeddings"],
        )
        found["rope.scaling.original_context_length"] = trained
        factor = rope.get("factor") or length / trained
        if "long_factor" in rope:
            scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
            found["rope.scaling.attn_factor"] = scale
    return found


def rope_tensors(config: Config) -> dict[str, Array]:
    """Llama 3's rule, worked out for each frequency, and Phi 3's factors."""
    rope = config.get("rope_parameters") or {}
    if "long_factor" in rope:
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32)
            for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    size = head_dim(config)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length, factors = rope["original_max_position_embeddings"], []
    for i in range(0, size, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / size)
        if wavelength < length / high:
            factors.append(1.0)
        elif wavelength > length / low:
            factors.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def tensor_name(name: str, model_type: str) -> str:
    names = NAMES | OWN_NAMES.get(model_type, {})
    for ending, theirs in WITHOUT_KIND.items():
        if name.endswith(f".{ending}"):
            return f"blk.{name.split('.')[2]}.{theirs}"
    stem, _, kind = name.rpartition(".")
    found = re.fullmatch(r"(?:model\.layers|transformer\.h|gpt_neox\.layers)\.(\d+)\.(.+)", stem)
    if found is None:
        return f"{names[stem]}.{kind}"
    return f"blk.{found.group(1)}.{names[found.group(2)]}.{kind}"


def arranged(name: str, values: Array, config: Config) -> Array:
    """A tensor as files hold it."""
    kind = config["model_type"]
    if re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return values.T
    if "linear_attn." in name:
        return _arranged_linear(name, values, config)
    if kind.startswith(("gemma", *HYBRID)) and name.endswith("norm.weight"):
        return values + 1
    if ".query_key_value." in name:
        heads = config["num_attention_heads"]
        by_head = values.reshape(heads, 3, len(values) // heads // 3, *values.shape[1:])
        return by_head.swapaxes(0, 1).reshape(values.shape)
    is_rotated = re.search(r"\.([qk])_proj\.", name)
    if not is_rotated or kind not in PERMUTED:
        return values
    heads = config["num_attention_heads"]
    if is_rotated.group(1) == "k":
        heads = config["num_key_value_heads"]
    halves = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _arranged_linear(name: str, values: Array, config: Config) -> Array:
    """Of linear attention; of Qwen 3.5 the heads of values take turns among the key heads."""
    if name.endswith("A_log"):
        values = -np.exp(values)
    values = values.squeeze(1) if "conv1d" in name else values
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if config["model_type"] == "qwen3_next" or keys == heads:
        return values

    def in_turn(part: Array) -> Array:
        size = len(part) // heads
        by_key = part.reshape(keys, heads // keys, size, *part.shape[1:])
        return by_key.swapaxes(0, 1).reshape(part.shape)

    if name.endswith("linear_attn.norm.weight"):
        return values
    if "out_proj" in name:
        return np.ascontiguousarray(in_turn(values.T).T)
    first = 2 * keys * config["linear_key_head_dim"] if "qkv" in name or "conv1d" in name else 0
    return np.concatenate((values[:first], in_turn(values[first:])))


def with_split_heads(tensors: Mapping[str, Array], config: Config) -> dict[str, Array]:
    """Part the keys' weights of compressed vectors from the values', transposed for each head."""
    found: dict[str, Array] = {}
    for name, values in tensors.items():
        stem, is_such, _ = name.partition("kv_b_proj")
        if not is_such or config["model_type"] not in SPLIT_HEADS or config.get(IN_ONE):
            found[name] = values
            continue
        by_head = values.reshape(config["num_attention_heads"], -1, values.shape[1])
        keys, others = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
        found[f"{stem}k_b_proj.weight"] = np.ascontiguousarray(keys.swapaxes(1, 2))
        found[f"{stem}v_b_proj.weight"] = np.ascontiguousarray(others)
    return found


def with_split_inputs(tensors: Mapping[str, Array], config: Config) -> dict[str, Array]:
    """Part what goes into Qwen 3 Next's linear attention, which checkpoints hold by key head."""
    found: dict[str, Array] = {}
    for name, values in tensors.items():
        stem, is_such, _ = name.partition("in_proj_qkvz")
        if not is_such:
            found[name] = values
            continue
        keys, key_dim = config["linear_num_key_heads"], config["linear_key_head_dim"]
        by_key = values.reshape(keys, -1, values.shape[1])
        own = (by_key.shape[1] - 2 * key_dim) // 2
        parts = np.split(by_key, [key_dim, 2 * key_dim, 2 * key_dim + own], axis=1)
        *qkv, z = (part.reshape(-1, values.shape[1]) for part in parts)
        found[f"{stem}in_proj_qkv.weight"] = np.concatenate(qkv)
        found[f"{stem}in_proj_z.weight"] = z
    return found


def with_stacked_experts(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Put the experts of a layer, which checkpoints hold one by one, into one tensor."""
    found: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, values in _parted(tensors).items():
        parts = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", name)
        if parts is None:
            found[name] = values
        else:
            layer, number, rest = parts.groups()
            experts.setdefault(f"{layer}.{rest}", {})[int(number)] = values
    for name, each in experts.items():
        found[name] = np.stack([each[number] for number in range(len(each))])
    return found


def _parted(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Part gates from the rows beside them, with which they take turns in gpt-oss, whose matrices
    have their inputs first."""
    found: dict[str, Array] = {}
    for name, values in tensors.items():
        stem, _, kind = name.rpartition(".experts.")
        part, is_bias = kind.removesuffix("_bias"), kind.endswith("_bias")
        if not stem or part not in ("gate_up_proj", "down_proj"):
            found[name] = values
            continue
        rows = values if is_bias else values.swapaxes(1, 2)
        own = {"down_proj": rows}
        if part == "gate_up_proj":
            own = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
        ending = "bias" if is_bias else "weight"
        found |= {f"{stem}.experts.{each}.{ending}": own[each] for each in own}
    return found
