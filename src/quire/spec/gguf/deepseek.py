"""Convert the metadata of architectures with latent attention or with DeepSeek's mixtures of
experts to configs.

Values that a file omits are llama.cpp's defaults. Files of `deepseek2` have one of two forms. Newer
ones hold the weights of keys and of values apart for each head, and lengths of compressed vectors.
Older ones hold one matrix for both, and the lengths of the heads.
"""

from typing import Any

from quire.spec.gguf.metadata import Metadata, layer_count, longrope, rope

Config = dict[str, Any]
SOFTMAX, SIGMOID = 1, 2  # values of expert_gating_func
LOG_FACTOR = "rope.scaling.yarn_log_multiplier"  # 0.1 mscale_all_dim, in float32
ATTENTION_FACTOR = "rope.scaling.attn_factor"
GATING = "expert_gating_func"
TEMPERATURE = "attention.temperature_scale"  # of Mistral's models, which have this architecture too


def deepseek2(meta: Metadata) -> Config:
    """Return the config of DeepSeek V2 or V3, or of Kimi K2 or GLM 4.7 Flash as DeepSeek V3."""
    if (scale := meta.number(TEMPERATURE, 0.0)) != 0.0:
        raise meta.error(TEMPERATURE, f"{scale}; scores that grow with positions are not supported")
    sizes = _latent_sizes(meta)
    in_one = not meta.has("attention.key_length_mla")
    names = ("key_length", "value_length") if in_one else ("key_length_mla", "value_length_mla")
    keys, values = (meta.count(f"attention.{name}") for name in names)
    sizes |= _head_sizes(meta, sizes, keys, values, in_one=in_one)
    first_sparse = meta.count("leading_dense_block_count", 0, minimum=0)
    has_bias = f"blk.{first_sparse}.exp_probs_b.bias" in meta.file.tensors
    gating = meta.count(GATING, SIGMOID if has_bias else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        raise meta.error(GATING, f"{gating}; supported are {SOFTMAX} and {SIGMOID}")
    config = sizes | routed_experts(meta, sizes)
    config["rope_parameters"] = _deepseek_rope(meta, sizes["qk_rope_head_dim"])
    if gating == SIGMOID:
        return config | {"model_type": "deepseek_v3"}
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return config | {"model_type": "deepseek_v2", "topk_method": method}


def minicpm3(meta: Metadata) -> Config:
    """Return the config of MiniCPM 3. Its scales are constants in llama.cpp, as in
    `config_defaults.py`."""
    sizes = _latent_sizes(meta)
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    keys = meta.count("attention.key_length")
    values = meta.count("attention.value_length", max(1, hidden // heads))
    sizes |= _head_sizes(meta, sizes, keys, values, in_one=True)
    shape = {"ffn_up": (sizes["intermediate_size"], hidden)}
    meta.check_layers(range(sizes["num_hidden_layers"]), shape)
    length = meta.count("rope.scaling.original_context_length", sizes["max_position_embeddings"])
    return sizes | {
        "model_type": "minicpm3",
        "rope_parameters": longrope(meta, sizes["qk_rope_head_dim"]),
        "original_max_position_embeddings": length,
    }


def glm4_moe(meta: Metadata, sizes: Config) -> Config:
    """Read the experts of GLM 4.5, and whether heads are normalised."""
    if (gating := meta.count(GATING, SIGMOID)) != SIGMOID:
        raise meta.error(GATING, f"{gating}; only {SIGMOID} is supported here")
    has_norm = "blk.0.attn_q_norm.weight" in meta.file.tensors
    return routed_experts(meta, sizes) | {"use_qk_norm": has_norm}


def routed_experts(meta: Metadata, sizes: Config) -> Config:
    """Read DeepSeek's mixtures of experts, which all but the first layers have."""
    num_layers, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    first = min(meta.count("leading_dense_block_count", 0, minimum=0), num_layers)
    num, inner = meta.count("expert_count"), meta.count("expert_feed_forward_length")
    meta.check_layers(range(first), {"ffn_up": (sizes["intermediate_size"], hidden)})
    meta.check_layers(range(first, num_layers), {"ffn_gate_exps": (num, inner, hidden)})
    return {
        "n_routed_experts": num,
        "num_experts_per_tok": meta.count("expert_used_count"),
        "moe_intermediate_size": inner,
        "n_shared_experts": meta.count("expert_shared_count", 0, minimum=0),
        "first_k_dense_replace": first,
        "routed_scaling_factor": meta.number("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": meta.flag("expert_weights_norm", False),
        "n_group": meta.count("expert_group_count", 0, minimum=0) or 1,
        "topk_group": meta.count("expert_group_used_count", 0, minimum=0) or 1,
    }


def _latent_sizes(meta: Metadata) -> Config:
    """Read the sizes that all architectures with latent attention have."""
    heads = meta.count("attention.head_count")
    query_rank = meta.count("attention.q_lora_rank", 0, minimum=0)
    return {
        "num_hidden_layers": layer_count(meta),
        "hidden_size": meta.count("embedding_length"),
        "intermediate_size": meta.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": meta.count("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "q_lora_rank": query_rank or None,
        "kv_lora_rank": meta.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": meta.count("rope.dimension_count"),
        "attention_bias": False,
    }


def _head_sizes(meta: Metadata, sizes: Config, keys: int, values: int, *, in_one: bool) -> Config:
    """Return the sizes of heads, checked against the matrices' shapes.

    keys, values: sizes of a head's query and value. in_one: whether one matrix makes all keys and
    values of compressed vectors."""
    heads, hidden = sizes["num_attention_heads"], sizes["hidden_size"]
    rank, rotated, query_rank = (
        sizes[name] for name in ("kv_lora_rank", "qk_rope_head_dim", "q_lora_rank")
    )
    plain = keys - rotated
    if plain < 1:
        raise meta.error("rope.dimension_count", f"{rotated}, but heads have {keys} dimensions")
    shapes: dict[str, tuple[int, ...]] = {"attn_kv_a_mqa": (rank + rotated, hidden)}
    if query_rank is None:
        shapes["attn_q"] = (heads * keys, hidden)
    else:
        shapes |= {"attn_q_a": (query_rank, hidden), "attn_q_b": (heads * keys, query_rank)}
    if in_one:
        shapes["attn_kv_b"] = (heads * (plain + values), rank)
    else:
        shapes |= {"attn_k_b": (heads, rank, plain), "attn_v_b": (heads, values, rank)}
    meta.check_layers(range(sizes["num_hidden_layers"]), shapes)
    return {"qk_nope_head_dim": plain, "v_head_dim": values}


def _deepseek_rope(meta: Metadata, rotated: int) -> Config:
    """Return `rope_parameters`. With yarn, sines and cosines have no factor. The file's logarithmic
    factor sharpens the scores."""
    found = rope(meta, rotated)
    if found["rope_type"] != "yarn":
        return found
    if (factor := meta.number(ATTENTION_FACTOR, 1.0)) != 1.0:
        raise meta.error(ATTENTION_FACTOR, f"{factor}; {meta.architecture} has none here")
    weight = round(10 * meta.number(LOG_FACTOR, 0.0), 6)
    return found | {"attention_factor": 1.0, "mscale_all_dim": weight}
