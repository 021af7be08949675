"""Tiny checkpoints of encoders, written by transformers, and what it makes of them and of texts."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as tk
import torch
import transformers as tf
from tokenizers import models, normalizers, pre_tokenizers, processors

from quire.tools.verify.precision import WholePrecision
from tests.support.render.tiny_tokenizers import fresh_directory, wordpiece_model

MAX_LEN = 96
BERT_LIKE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
}
ROBERTA_LIKE = BERT_LIKE | {"max_position_embeddings": MAX_LEN + 2, "type_vocab_size": 1}
MODERN: dict[str, Any] = BERT_LIKE | {
    "num_hidden_layers": 5,
    "local_attention": 10,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 800.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
    },
}
# Type, config and the classes without and with a head of classes.
FAMILIES: dict[str, tuple[type, dict[str, Any], type, type]] = {
    "bert": (tf.BertConfig, BERT_LIKE, tf.BertModel, tf.BertForSequenceClassification),
    "roberta": (
        tf.RobertaConfig,
        ROBERTA_LIKE,
        tf.RobertaModel,
        tf.RobertaForSequenceClassification,
    ),
    "xlm-roberta": (
        tf.XLMRobertaConfig,
        ROBERTA_LIKE,
        tf.XLMRobertaModel,
        tf.XLMRobertaForSequenceClassification,
    ),
    "camembert": (
        tf.CamembertConfig,
        ROBERTA_LIKE,
        tf.CamembertModel,
        tf.CamembertForSequenceClassification,
    ),
    "modernbert": (
        tf.ModernBertConfig,
        MODERN,
        tf.ModernBertModel,
        tf.ModernBertForSequenceClassification,
    ),
}
# Of each: the tokens before, between, behind texts, and those of padding and of what is unknown.
SPECIAL = {
    "bert": ("[CLS]", "[SEP]", "[PAD]", "[UNK]"),
    "modernbert": ("[CLS]", "[SEP]", "[PAD]", "[UNK]"),
    "roberta": ("<s>", "</s>", "<pad>", "<unk>"),
    "xlm-roberta": ("<s>", "</s>", "<pad>", "<unk>"),
    "camembert": ("<s>", "</s>", "<pad>", "<unk>"),
}


def write_tokenizer(folder: Path, family: str) -> int:
    """Write the tokenizer of a family; returns the size of its vocabulary."""
    begin, end, pad, unknown = SPECIAL[family]
    is_roberta = begin == "<s>"
    backend = tk.Tokenizer(models.WordPiece(unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    # RoBERTa's padding is token 1, BERT's token 0.
    special = [begin, pad, end, unknown] if is_roberta else [pad, unknown, begin, end]
    backend.model = wordpiece_model(backend, special, unknown)
    backend.add_special_tokens(special)
    middle = f"{end} {end}" if is_roberta else end
    kind = ":1" if family == "bert" else ":0"
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {middle} $B{kind} {end}{kind}",
        special_tokens=[(each, backend.token_to_id(each)) for each in (begin, end)],
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "cls_token": begin,
        "sep_token": end,
        "pad_token": pad,
        "unk_token": unknown,
        "model_max_length": MAX_LEN,
    }
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if family == "bert" else [])]
    values = config | {"model_input_names": names}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return backend.get_vocab_size()


@cache
def encoder_checkpoint(
    family: str, num_labels: int = 0, changes: tuple[tuple[str, Any], ...] = ()
) -> Path:
    """With a tokenizer. num_labels: of its head, 0 for none. changes: of its config."""
    folder = fresh_directory()
    vocab_size = write_tokenizer(folder, family)
    config_class, fields, bare, classifier = FAMILIES[family]
    fields = fields | ({"num_labels": num_labels} if num_labels else {}) | dict(changes)
    fields |= {"pad_token_id": 1 if SPECIAL[family][0] == "<s>" else 0}
    torch.manual_seed(0)
    model = (classifier if num_labels else bare)(config_class(vocab_size=vocab_size, **fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, 0.3)
    model.save_pretrained(folder)
    return folder


def is_near(one: Sequence[Any], other: Sequence[Any], bound: float = 1e-10) -> None:
    """Raise AssertionError unless all numbers are as near, and wild enough to tell anything."""
    assert len(one) == len(other) and np.std(np.concatenate(other)) > 1e-3
    for got, wanted in zip(one, other, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=bound, atol=bound)


def inputs_of(
    folder: Path, texts: Sequence[str | tuple[str, str]]
) -> list[dict[str, torch.Tensor]]:
    """What transformers' tokenizer makes of texts and of pairs, each for itself."""
    tokenizer = tf.AutoTokenizer.from_pretrained(folder)
    parts = [(each,) if isinstance(each, str) else each for each in texts]
    return [dict(tokenizer(*each, return_tensors="pt")) for each in parts]


@torch.inference_mode()
def states_of(folder: Path, inputs: Sequence[dict[str, torch.Tensor]]) -> list[np.ndarray]:
    """Hidden states, [tokens, D] of each, in float64."""
    with WholePrecision():
        model = _loaded(tf.AutoModel, folder)
        return [model(**each).last_hidden_state[0].numpy() for each in inputs]


@torch.inference_mode()
def logits_of(folder: Path, inputs: Sequence[dict[str, torch.Tensor]]) -> list[np.ndarray]:
    """[labels] of each, in float64."""
    with WholePrecision():
        model = _loaded(tf.AutoModelForSequenceClassification, folder)
        return [model(**each).logits[0].numpy() for each in inputs]


def _loaded(auto: Any, folder: Path) -> Any:
    return auto.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
