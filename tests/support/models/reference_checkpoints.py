"""Tiny random checkpoints written by transformers, and what transformers itself makes of them."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from quire.models.checkpoint.source import resolve_model
from quire.spec.model_spec import load_spec
from tests.support.render.tiny_tokenizers import fresh_directory, write_directory

MAX_POSITION = 128
WINDOW = 9  # of the mistral here: smaller than most prompts
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    # Weights so large that the next token depends on all that came before it.
    "initializer_range": 0.3,
}
LATENT = LLAMA_LIKE | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
}
ROUTED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, tf.LlamaForCausalLM, LLAMA_LIKE),
    "qwen2": (tf.Qwen2Config, tf.Qwen2ForCausalLM, LLAMA_LIKE),
    "qwen3": (tf.Qwen3Config, tf.Qwen3ForCausalLM, LLAMA_LIKE | {"head_dim": 16}),
    "qwen3_moe": (
        tf.Qwen3MoeConfig,
        tf.Qwen3MoeForCausalLM,
        LLAMA_LIKE
        | {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_5": (  # the last layer of four attends
        tf.Qwen3_5TextConfig,
        tf.Qwen3_5ForCausalLM,
        LLAMA_LIKE
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "mistral": (tf.MistralConfig, tf.MistralForCausalLM, LLAMA_LIKE | {"sliding_window": WINDOW}),
    "opt": (
        tf.OPTConfig,
        tf.OPTForCausalLM,
        {
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": MAX_POSITION,
            "init_std": 0.3,
        },
    ),
    "gpt2": (
        tf.GPT2Config,
        tf.GPT2LMHeadModel,
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": MAX_POSITION,
            "initializer_range": 0.3,
        },
    ),
    # Without compressed queries and groups of experts, as V2 Lite.
    "deepseek_v2": (
        tf.DeepseekV2Config,
        tf.DeepseekV2ForCausalLM,
        LATENT | ROUTED | {"q_lora_rank": None, "topk_method": "greedy"},
    ),
    "deepseek_v3": (
        tf.DeepseekV3Config,
        tf.DeepseekV3ForCausalLM,
        LATENT | ROUTED | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    ),
}
ARCHITECTURES = tuple(CONFIGS)
IN_TURN = LLAMA_LIKE | {"layer_types": ["sliding_attention", "full_attention"]}
GEMMA = IN_TURN | {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16}
MIXTURE = {"num_local_experts": 6, "num_experts": 6, "num_experts_per_tok": 2}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.7, 2.5],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "factor": 4.0,
}
# Families made of the same parts in other ways. The first three and gpt_oss have windows in turn,
# llama4_text has chunks.
FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gemma2": (
        tf.Gemma2Config,
        tf.Gemma2ForCausalLM,
        GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": (tf.Gemma3TextConfig, tf.Gemma3ForCausalLM, GEMMA),
    "cohere2": (tf.Cohere2Config, tf.Cohere2ForCausalLM, IN_TURN | {"sliding_window": WINDOW}),
    "olmo2": (tf.Olmo2Config, tf.Olmo2ForCausalLM, LLAMA_LIKE),
    "granite": (tf.GraniteConfig, tf.GraniteForCausalLM, LLAMA_LIKE | {"residual_multiplier": 0.7}),
    "smollm3": (
        tf.SmolLM3Config,
        tf.SmolLM3ForCausalLM,
        LLAMA_LIKE | {"no_rope_layer_interval": 2},
    ),
    "phi3": (
        tf.Phi3Config,
        tf.Phi3ForCausalLM,
        LLAMA_LIKE | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 96},
    ),
    "glm4": (tf.Glm4Config, tf.Glm4ForCausalLM, LLAMA_LIKE | {"head_dim": 8}),
    "gpt_neox": (tf.GPTNeoXConfig, tf.GPTNeoXForCausalLM, LLAMA_LIKE),
    "mixtral": (tf.MixtralConfig, tf.MixtralForCausalLM, LLAMA_LIKE | MIXTURE),
    "qwen2_moe": (
        tf.Qwen2MoeConfig,
        tf.Qwen2MoeForCausalLM,
        LLAMA_LIKE | MIXTURE | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "qwen3_5_text": (
        tf.Qwen3_5TextConfig,
        tf.Qwen3_5ForCausalLM,
        LLAMA_LIKE
        | {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
        },
    ),
    "glm4_moe": (tf.Glm4MoeConfig, tf.Glm4MoeForCausalLM, LLAMA_LIKE | ROUTED),
    "minicpm3": (
        tf.MiniCPM3Config,
        tf.MiniCPM3ForCausalLM,
        LATENT | {"q_lora_rank": 24, "scale_emb": 2.0, "dim_model_base": 16},
    ),
    "gpt_oss": (
        tf.GptOssConfig,
        tf.GptOssForCausalLM,
        LLAMA_LIKE | MIXTURE | {"head_dim": 16, "sliding_window": WINDOW, "swiglu_limit": 2.0},
    ),
    "llama4_text": (  # the first layer has chunks, the second has experts and no rotation
        tf.Llama4TextConfig,
        tf.Llama4ForCausalLM,
        LLAMA_LIKE
        | {
            "head_dim": 16,
            "attention_chunk_size": WINDOW,
            "no_rope_layer_interval": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 40,
            "num_local_experts": 6,
            "floor_scale": 5,
        },
    ),
}
MULTI_QUERY = LLAMA_LIKE | {"num_key_value_heads": 1}
CONFIGS |= FAMILIES | {"multi_query": (tf.LlamaConfig, tf.LlamaForCausalLM, MULTI_QUERY)}


def write_checkpoint(folder: Path, architecture: str, vocab_size: int, seed: int = 0) -> Path:
    """config.json and model.safetensors. No token ends a sequence unless a test says so."""
    config_class, model_class, fields = CONFIGS[architecture]
    torch.manual_seed(seed)
    config = config_class(vocab_size=vocab_size, **(fields | NO_TOKENS))
    model_class(config).save_pretrained(folder)
    return folder


@cache
def checkpoint(architecture: str, vocab_size: int = 97) -> Path:
    """Without a tokenizer; one per architecture for the whole test run."""
    return write_checkpoint(fresh_directory(), architecture, vocab_size)


@cache
def text_checkpoint(architecture: str = "llama") -> Path:
    """With a tokenizer of the byte-level family, whose end of sequence the model does not know."""
    folder = write_directory(fresh_directory(), "byte_level")
    return write_checkpoint(folder, architecture, vocab_size=424)


@cache
def twins_checkpoint(vocab_size: int) -> Path:
    """A llama to which the tokens 2k and 2k + 1 are the same, so that their logits tie."""
    folder = write_checkpoint(fresh_directory(), "llama", vocab_size)
    model = tf.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[1::2] = weight[::2]
    model.save_pretrained(folder)
    return folder


@cache
def shallow(model: str, num_layers: int) -> Path:
    """The first layers of a model, and its head: it guesses what the whole model says."""
    whole, folder = resolve_model(model).directory, fresh_directory()
    raw = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(next(whole.glob("*.safetensors")))
    deeper = [f".layers.{i}." for i in range(num_layers, load_spec(whole).num_layers)]
    kept = {n: t for n, t in tensors.items() if not any(each in n for each in deeper)}
    save_file(kept, folder / "model.safetensors")
    return folder


@cache
def reference_model(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    # torch's grouped products, which experts would be multiplied with, have no float64.
    options = {"dtype": dtype, "experts_implementation": "eager"}
    return tf.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def reference_tokens(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by transformers in float64."""
    return list(_continuation(folder, tuple(prompt), num_tokens))


@cache
@torch.inference_mode()
def _continuation(folder: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model = reference_model(folder)
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **options)
    return tuple(out[0, len(prompt) :].tolist())


@torch.inference_mode()
def confirmed_tokens(folder: Path, prompt: list[int], tokens: list[int]) -> list[int]:
    """Return what `reference_tokens` does, as many as the given tokens. If they are right, that
    takes one forward pass."""
    logits = reference_model(folder)(torch.tensor([prompt + tokens])).logits[0]
    wanted: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return wanted if wanted == tokens else reference_tokens(folder, prompt, len(tokens))


@torch.inference_mode()
def reference_logits(
    folder: Path, tokens: list[int], dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """[tokens, V] by transformers."""
    return reference_model(folder, dtype)(torch.tensor([tokens])).logits[0]


def pool_bytes(folder: Path, num_blocks: int, block_size: int, dtype_bytes: int = 8) -> int:
    """A kv_cache_memory_bytes that gives each cache group num_blocks blocks."""
    groups = load_spec(folder).cache_groups
    return num_blocks * sum(group.block_bytes(block_size, dtype_bytes) for group in groups)


@cache
def reference_beams(
    prompt: tuple[int, ...],
    width: int,
    num_tokens: int,
    stops: tuple[int, ...] = (),
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    folder: Path | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """(output tokens, score) of transformers' beams, best first, as far as they are finished.

    folder: of the model; the llama if absent."""
    model = reference_model(folder or checkpoint("llama"))
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_tokens,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
        if score > -1e8:
            found.append((tuple(tokens[:end]), score))
    return found


@cache
def changed(architecture: str, seed: int) -> Path:
    """Return a checkpoint whose weights differ from those of `checkpoint(architecture)`."""
    folder = fresh_directory()
    shutil.copytree(checkpoint(architecture), folder, dirs_exist_ok=True)
    save_file(changed_tensors(architecture, seed), folder / "model.safetensors")
    return folder


def changed_tensors(architecture: str, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of `changed` by name."""
    numbers = torch.Generator().manual_seed(seed)
    tensors = load_file(checkpoint(architecture) / "model.safetensors")
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=numbers).to(tensor.dtype)
        for name, tensor in sorted(tensors.items())
    }
