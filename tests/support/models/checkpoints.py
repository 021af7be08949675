"""Tiny checkpoints with random weights, written by transformers, and its logits for them."""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from quire.spec.model_spec import ModelSpec, load_spec
from quire.tools.verify.precision import WholePrecision

OFFSET_NORMS = ("gemma", "qwen3_next", "qwen3_5")  # theirs are 1 + weight
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
VOCAB = 97
LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "ffn_dim": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 128,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = LLAMA | {"head_dim": 16}
EXPERTS = QWEN3 | {
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
PHI3 = LLAMA | {"pad_token_id": 0, "num_hidden_layers": 2}
NEOX = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
SHARED = EXPERTS | {"head_dim": 8, "shared_expert_intermediate_size": 20, "qkv_bias": True}
MIXTRAL = LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2}
OSS = QWEN3 | {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
    "swiglu_limit": 1.5,
    "rope_parameters": YARN_ROPE | {"truncate": False, "rope_theta": 500.0},
}
# Heads of 16 dimensions, of which 12 are turned.
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.0],
    "long_factor": [1.5, 2.0, 3.0, 5.0, 8.0, 11.0],
}

GEMMA2 = QWEN3 | {
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 16,
    "sliding_window": 6,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = GEMMA2 | {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
GRANITE = LLAMA | {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.625,
    "logits_scaling": 2.5,
}
SMOLLM3 = LLAMA | {"num_hidden_layers": 4, "pad_token_id": 0}
COHERE2 = LLAMA | {"num_hidden_layers": 4, "sliding_window": 6, "logit_scale": 0.5}
# Three layers with linear attention and one with full; heads of 16 dimensions, 4 of them turned.
# Norms of nearly nothing would make much of what float32 rounds.
HYBRID = LLAMA | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}
# Few layers, and most of the experts: what is rounded sends few tokens to others.
HYBRID_EXPERTS = HYBRID | {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 4,
}

# Chunks and periods shorter than most prompts; the second layer has experts, the last no rotation.
LLAMA4 = LLAMA | {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 7,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "floor_scale": 5,
    "attn_scale": 0.3,
}
LATENT = LLAMA | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
# Four groups of two experts, of which a token reaches two groups.
ROUTED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
DEEPSEEK_YARN = YARN_ROPE | {"rope_theta": 500.0, "mscale": 0.7, "mscale_all_dim": 1.3}

# name -> (model_type, config)
VARIANTS = {
    "llama": ("llama", LLAMA),
    "llama_tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "llama_biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama_multi_query": ("llama", LLAMA | {"num_key_value_heads": 1, "head_dim": 12}),
    "llama3_rope": ("llama", LLAMA | {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}),
    "linear_rope": ("llama", LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "yarn_rope": ("qwen3", QWEN3 | {"rope_scaling": YARN_ROPE}),
    "qwen2": ("qwen2", LLAMA | {"tie_word_embeddings": True}),
    "qwen2_windows": (
        "qwen2",
        LLAMA | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", QWEN3),
    "qwen3_tied": ("qwen3", QWEN3 | {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    # Only the last layer of four has experts, and a token is sent to all but one of them.
    "qwen3_moe_some": (
        "qwen3_moe",
        EXPERTS
        | {
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "num_experts_per_tok": 5,
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_window": (
        "qwen3_moe",
        EXPERTS | {"use_sliding_window": True, "sliding_window": 6, "num_experts_per_tok": 1},
    ),
    "mixtral": ("mixtral", MIXTRAL | {"sliding_window": None}),
    "mixtral_window": ("mixtral", MIXTRAL | {"sliding_window": 9, "num_experts_per_tok": 1}),
    "qwen2_moe": ("qwen2_moe", SHARED),
    # The third layer alone has no experts; the first two of four have a window in turn.
    "qwen2_moe_some": (
        "qwen2_moe",
        SHARED
        | {
            "norm_topk_prob": False,
            "qkv_bias": False,
            "num_hidden_layers": 4,
            "mlp_only_layers": [2],
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
        },
    ),
    "gpt_oss": ("gpt_oss", OSS),
    "gpt_oss_plain": (
        "gpt_oss",
        OSS
        | {
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 2,
            "num_hidden_layers": 2,
            "num_experts_per_tok": 5,
            "swiglu_alpha": 1.1,
        },
    ),
    "mistral": ("mistral", LLAMA | {"sliding_window": None}),
    "mistral_window": ("mistral", LLAMA | {"sliding_window": 9}),
    "phi3": ("phi3", PHI3 | {"sliding_window": 9}),
    # Beyond 4 tokens by the long factors, as transformers.
    "phi3_long": (
        "phi3",
        PHI3
        | {
            "num_attention_heads": 2,
            "rope_parameters": LONGROPE | {"factor": 1.5},
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4,
            "tie_word_embeddings": True,
        },
    ),
    "phi3_short": (
        "phi3",
        PHI3
        | {
            "num_attention_heads": 2,
            "rope_parameters": LONGROPE | {"factor": 4.0},
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 128,
        },
    ),
    "glm4": ("glm4", QWEN3 | {"num_hidden_layers": 2, "pad_token_id": 0}),
    "glm4_plain": (
        "glm4",
        QWEN3
        | {
            "num_hidden_layers": 2,
            "pad_token_id": 0,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
        },
    ),
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox_serial": (
        "gpt_neox",
        NEOX
        | {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_fast",
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 1.0},
        },
    ),
    "opt": ("opt", OPT),
    "opt_350m": ("opt", OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt_plain": ("opt", OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "gpt2": ("gpt2", GPT2),
    "gemma2": ("gemma2", GEMMA2),
    "gemma2_plain": (
        "gemma2",
        GEMMA2
        | {
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "gemma3": ("gemma3_text", GEMMA3 | {"query_pre_attn_scalar": 24}),
    "gemma3_scaled": (
        "gemma3_text",
        GEMMA3
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
        },
    ),
    "olmo2": ("olmo2", LLAMA),
    "olmo2_biases": (
        "olmo2",
        LLAMA | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
    ),
    "granite": ("granite", GRANITE | {"tie_word_embeddings": True}),
    "granite_biases": ("granite", GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "smollm3": ("smollm3", SMOLLM3),
    "smollm3_windows": (
        "smollm3",
        SMOLLM3
        | {
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": ("llama4_text", LLAMA4),
    "llama4_some": (
        "llama4_text",
        LLAMA4
        | {
            "num_hidden_layers": 4,
            "no_rope_layers": [0, 1, 1, 0],
            "layer_types": ["full_attention", "full_attention"] + ["chunked_attention"] * 2,
            "moe_layers": [0, 3],
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500.0},
        },
    ),
    "llama4_plain": (
        "llama4_text",
        LLAMA4
        | {
            "num_hidden_layers": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": None,
            "attn_temperature_tuning": False,
            "moe_layers": [],
            "rms_norm_eps": 0.1,
            "rope_parameters": YARN_ROPE | {"rope_theta": 500.0},
        },
    ),
    "cohere2": ("cohere2", COHERE2),
    "cohere2_biases": (
        "cohere2",
        COHERE2
        | {
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    "qwen3_next": ("qwen3_next", HYBRID_EXPERTS),
    "qwen3_next_some": (
        "qwen3_next",
        HYBRID_EXPERTS
        | {
            "norm_topk_prob": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "mlp_only_layers": [2],
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 2,
        },
    ),
    "qwen3_5": ("qwen3_5_text", HYBRID | {"tie_word_embeddings": True}),
    "qwen3_5_wide": (
        "qwen3_5_text",
        HYBRID
        | {
            "attention_bias": True,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_value_heads": 6,
            "linear_conv_kernel_dim": 5,
            "rope_parameters": YARN_ROPE
            | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "rope_theta": 500.0},
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID_EXPERTS),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT | ROUTED | {"topk_method": "group_limited_greedy", "rope_parameters": DEEPSEEK_YARN},
    ),
    # As V2 Lite: neither compressed queries nor groups.
    "deepseek_v2_lite": (
        "deepseek_v2",
        LATENT
        | ROUTED
        | {
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3": ("deepseek_v3", LATENT | ROUTED | {"rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3_some": (
        "deepseek_v3",
        LATENT
        | ROUTED
        | {
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "attention_bias": True,
            "num_experts_per_tok": 7,
            "n_shared_experts": 1,
            "first_k_dense_replace": 2,
        },
    ),
    "glm4_moe": ("glm4_moe", QWEN3 | ROUTED | {"use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_plain": (
        "glm4_moe",
        QWEN3
        | ROUTED
        | {
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0},
            "tie_word_embeddings": True,
            "first_k_dense_replace": 0,
        },
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        LATENT | ROUTED | {"mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    # As GGUF files can say it: dense layers come first, and MiniCPM's scales are its own.
    "glm4_moe_lite_plain": (
        "glm4_moe_lite",
        LATENT | ROUTED | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "minicpm3_plain": ("minicpm3", LATENT | {"v_head_dim": 8}),
    "minicpm3": ("minicpm3", LATENT | {"scale_emb": 3.0, "scale_depth": 1.1, "dim_model_base": 8}),
    # Beyond 4 tokens by the long factors, as transformers.
    "minicpm3_long": (
        "minicpm3",
        LATENT
        | {
            "v_head_dim": None,
            "q_lora_rank": None,
            "attention_bias": True,
            "mlp_bias": True,
            "scale_depth": None,
            "dim_model_base": None,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.3],
                "long_factor": [1.5, 2.0, 3.0],
                "factor": 1.5,
                "original_max_position_embeddings": 4,
            },
        },
    ),
    "gpt2_scaled": ("gpt2", GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 24}),
}


@dataclass(frozen=True)
class Checkpoint:
    """A directory with config and weights, its spec, and the model as transformers runs it."""

    directory: Path
    spec: ModelSpec
    model: torch.nn.Module

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """[tokens, V]."""
        return self.model(torch.tensor([tokens])).logits[0]


_EXACT: dict[str, list[torch.Tensor]] = {}  # by a digest of the checkpoint and the sequences


@torch.inference_mode()
def exact_logits(directory: Path, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """[tokens, V] of each sequence by transformers, all of it in float64; computed once for each
    content of the directory."""
    digest = hashlib.sha256(json.dumps(sequences).encode())
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        digest.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    key = digest.hexdigest()
    if key not in _EXACT:
        _EXACT[key] = logits_in_float64(float64_model(directory), sequences)
    return _EXACT[key]


def float64_model(directory: Path) -> torch.nn.Module:
    """transformers' model of a checkpoint."""
    with WholePrecision():
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float64, **EAGER
        )
    return model


def logits_in_float64(
    model: torch.nn.Module, sequences: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """[tokens, V] of each sequence, by transformers' model."""
    with WholePrecision(), torch.inference_mode():
        return [model(torch.tensor([tokens])).logits[0] for tokens in sequences]


def write_checkpoint(directory: Path, variant: str, max_shard_size: str = "1GB") -> Checkpoint:
    """Write a variant's checkpoint with weights large enough that every part matters."""
    return write_own(directory, *VARIANTS[variant], max_shard_size)


def write_own(
    directory: Path, model_type: str, config: dict[str, Any], max_shard_size: str = "1GB"
) -> Checkpoint:
    """Write a checkpoint of another config. Tests share the model: do not change it."""
    made = _make(model_type, json.dumps(config), max_shard_size)
    made.write(directory)
    return Checkpoint(directory, load_spec(directory), made.model)


@dataclass(frozen=True)
class Made:
    """A model, the files of its checkpoint, and the random generator's state after its weights."""

    model: torch.nn.Module
    files: dict[str, bytes]
    random_state: torch.Tensor

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)
        torch.set_rng_state(self.random_state)


@functools.lru_cache(maxsize=96)  # most are a quarter of a megabyte
def _make(model_type: str, config: str, max_shard_size: str) -> Made:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **json.loads(config)),
        attn_implementation="eager",
    ).eval()
    for name, parameter in model.named_parameters():
        is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
        is_offset = model_type.startswith(OFFSET_NORMS) and "linear_attn" not in name
        parameter.data.normal_(1.0 if is_norm and not is_offset else 0.0, 0.25)
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory, max_shard_size=max_shard_size)
        files = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    return Made(model, files, torch.get_rng_state())


def random_tokens(*lengths: int, seed: int = 0) -> list[list[int]]:
    """A sequence of each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]
