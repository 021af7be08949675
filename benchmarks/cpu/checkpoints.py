"""The models that all engines load: random weights in a Hugging Face directory, and GGUF files.

Tokenizers are small byte-level BPEs, padded with names to the model's vocabulary. The workloads are
token ids, but most engines refuse a model without a tokenizer.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.cpu.workloads import Shape
from tests.support.models.gguf_writer import BF16, F16, Q4_0, Q8_0, byte_level_metadata, convert

SPREAD = 0.02
TRAINED_TOKENS = 1000
SPECIAL = ("<|begin|>", "<|end|>")
DOCUMENTS = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))
GGUF_KINDS = {"bf16": BF16, "f16": F16, "q8_0": Q8_0, "q4_0": Q4_0}
TOKEN_IDS = ("bos_token_id", "eos_token_id")
ROPE_THETA = {"qwen3": 1_000_000.0, "llama": 10_000.0}


def config_of(shape: Shape) -> dict[str, Any]:
    """Return config.json's content, as transformers 4 and 5 read it."""
    theta = ROPE_THETA[shape.model_type]
    return {
        "architectures": [
            "Qwen3ForCausalLM" if shape.model_type == "qwen3" else "LlamaForCausalLM"
        ],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": shape.vocab_size - 2,
        "eos_token_id": shape.vocab_size - 1,
    }


def weight_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights by their names in the file."""
    hidden, inner = shape.hidden, shape.intermediate
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (shape.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if shape.model_type == "qwen3":
        layer |= {"self_attn.q_norm": (shape.head_dim,), "self_attn.k_norm": (shape.head_dim,)}
    for i in range(shape.num_layers):
        found |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
    return found


def tokenizer_of(shape: Shape, special: Sequence[str] = SPECIAL) -> dict[str, Any]:
    """Return tokenizer.json: trained on the documentation, then names that no text contains.

    special: the last tokens of the vocabulary.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([path.read_text("utf-8") for path in DOCUMENTS], trainer)
    state: dict[str, Any] = json.loads(made.to_str())
    vocab = state["model"]["vocab"]
    for i in range(len(vocab), shape.vocab_size - len(special)):
        vocab[f"<|unused{i}|>"] = i
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for text in special:
        token = {"id": len(vocab), "content": text, "special": True, **flags}
        state["added_tokens"].append(token)
        vocab[text] = token["id"]
    return state


def is_written(shape: Shape, directory: Path) -> bool:
    """Return whether the directory is complete, and of the configuration that is written now."""
    if not (directory / "complete").exists():
        return False
    found: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return found == config_of(shape)


def write_checkpoint(shape: Shape, directory: Path) -> Path:
    """Write seeded normal weights in bfloat16, unless the directory is complete."""
    if is_written(shape, directory):
        return directory
    done = directory / "complete"
    done.unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in weight_shapes(shape).items():
        is_norm = len(size) == 1
        values = torch.ones(size) if is_norm else torch.randn(size, generator=made) * SPREAD
        tensors[name] = values.to(torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = config_of(shape)
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "model_max_length": config["max_position_embeddings"],
    }
    files = {"config.json": config, "tokenizer_config.json": tokenizer}
    files["tokenizer.json"] = tokenizer_of(shape)
    files["generation_config.json"] = {name: config[name] for name in TOKEN_IDS}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    done.touch()
    return directory


def write_gguf_file(directory: Path, kind: str, path: Path) -> Path:
    """Write all matrices in one kind, the tied embedding too, unless the file exists."""
    if not path.exists():
        unfinished = path.with_suffix(".unfinished")
        metadata = byte_level_metadata(directory, "qwen2")
        del metadata["tokenizer.ggml.token_type"]  # optional; llama.cpp wants it signed
        convert(directory, unfinished, GGUF_KINDS[kind], metadata)
        unfinished.rename(path)
    return path
