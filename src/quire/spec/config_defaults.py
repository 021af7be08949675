"""transformers' defaults for fields that a config omits, for each model type that quire runs.

Configs written by transformers omit nothing, but configs on the hub are often written by hand. The
table lists only fields that change the computation and whose default differs from the reader's.
"""

from collections.abc import Mapping
from typing import Any

BERT: Mapping[str, Any] = {"tie_word_embeddings": True, "max_position_embeddings": 512}
ROBERTA = {**BERT, "pad_token_id": 1}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "gpt2": {"tie_word_embeddings": True},
    "opt": {"tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
    },
    "phi3": {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    },
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2_moe": {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "shared_expert_intermediate_size": 5632,
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "smollm3": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
    },
    "granite": {},
    "glm4": {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
    },
    "cohere2": {
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_norm_eps": 1e-5,
    },
    "gpt_neox": {"attention_bias": True, "rotary_pct": 0.25, "hidden_act": "gelu"},
    "gpt_oss": {
        "head_dim": 64,
        "num_key_value_heads": 8,
        "sliding_window": 128,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "qwen3_next": {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3_5_text": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
    },
    "qwen3_5_moe_text": {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "shared_expert_intermediate_size": 512,
    },
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "modernbert": {**BERT, "max_position_embeddings": 8192},
}


def defaults_of(model_type: object) -> Mapping[str, Any]:
    """Return transformers' defaults for fields that a config of this type omits."""
    return DEFAULTS.get(model_type, {}) if isinstance(model_type, str) else {}
