"""Tiny checkpoints of models that pool, written by transformers, and what it makes of them."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf

from quire.tools.verify.precision import WholePrecision
from tests.support.models.reference_checkpoints import LLAMA_LIKE, NO_TOKENS
from tests.support.render.tiny_tokenizers import fresh_directory, write_directory

VOCAB = 424  # of the tokenizer
HEADS = {
    "embed": tf.Qwen3Model,
    "generate": tf.Qwen3ForCausalLM,
    "classify": tf.Qwen3ForSequenceClassification,
    "llama_score": tf.LlamaForSequenceClassification,
}


@cache
def pooling_checkpoint(kind: str, num_labels: int = 3, num_layers: int = 2) -> Path:
    """With a tokenizer. kind: of HEADS."""
    folder = write_directory(fresh_directory(), "byte_level")
    torch.manual_seed(0)
    model_class = HEADS[kind]
    is_llama = "llama" in kind
    config_class = tf.LlamaConfig if is_llama else tf.Qwen3Config
    fields: dict[str, Any] = LLAMA_LIKE | NO_TOKENS | {"pad_token_id": 0}
    fields["num_hidden_layers"] = num_layers
    config = config_class(vocab_size=VOCAB, num_labels=num_labels, head_dim=16, **fields)
    model_class(config).save_pretrained(folder)
    return folder


def with_modules(folder: Path, *modules: tuple[str, str, dict[str, Any] | None]) -> Path:
    """Write sentence-transformers' files beside a copy of a model: (type, path, config) of each
    module behind the transformer."""
    copy = fresh_directory()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    entries = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    ]
    for index, (kind, place, config) in enumerate(modules, 1):
        kind = f"sentence_transformers.models.{kind}"
        entries.append({"idx": index, "name": str(index), "path": place, "type": kind})
        if config is not None:
            (copy / place).mkdir()
            (copy / place / "config.json").write_text(json.dumps(config))
    (copy / "modules.json").write_text(json.dumps(entries))
    return copy


@torch.inference_mode()
def hidden_states(folder: Path, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """After the last norm, [tokens, D] of each prompt, in float64."""
    with WholePrecision():
        model = tf.AutoModel.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        return [model(torch.tensor([each])).last_hidden_state[0].numpy() for each in prompts]


@torch.inference_mode()
def class_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """[labels] of each prompt by transformers' own head, in float64."""
    with WholePrecision():
        model = tf.AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        model.config.pad_token_id = None
        return [model(torch.tensor([each])).logits[0].numpy() for each in prompts]
