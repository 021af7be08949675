"""Llama tokenizers give the ids of transformers' class, whatever their other files contain.

The reference is transformers 5. It derives the class's rule for words from tokenizer_config.json.
If there is a tokenizer.json, it does not read add_bos_token and add_eos_token.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.render.tokens.tokenizer import Tokenizer
from tests.support.render import tiny_tokenizers as tiny

TEXTS = [
    "", "Hello", " Hello", "  Hello", "Hello ", "<s> Hello", "<s>Hello", "<s>  Hello", "</s>",
    "a<s> b</s> c", "<s> ", "Hello\nx", "<s>\nHello", "x </s> y</s>z", " <s> x",
    "\u2581x <s>\u2581y", "你好 <s> 🙂",
]  # fmt: skip
# The rule in tokenizer.json: the legacy normaliser, or Metaspace with a scheme.
RULES = ("legacy", "first", "always", "never")
# add_prefix_space, legacy, add_bos_token, add_eos_token; None: not in the file
CONFIGS: list[tuple[bool | None, ...]] = [
    (None, None, None, None),
    (False, None, None, None),
    (True, None, None, None),
    (False, False, True, None),
    (True, False, True, True),
    (None, True, True, None),
    (True, True, False, False),
    (False, True, None, True),
]
NAMES = ("add_prefix_space", "legacy", "add_bos_token", "add_eos_token")


def tokenizer_json(rule: str, template: bool) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(tiny.llama().to_str())
    if rule != "legacy":
        state["normalizer"] = None
        state["pre_tokenizer"] = {
            "type": "Metaspace", "replacement": "\u2581", "prepend_scheme": rule, "split": False,
        }  # fmt: skip
    if not template:
        state["post_processor"] = None
    return state


def write(folder: Path, state: dict[str, Any], model_type: str | None, **config: Any) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(state))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def assert_same(folder: Path, case: object = None) -> None:
    ours, theirs = Tokenizer.from_directory(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, special) == ids, (case, text, special)
            shown = theirs.decode(ids, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == shown, (case, text, special)


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_ids_equal_those_of_the_llama_class(tmp_path: Path, rule: str, template: bool) -> None:
    state = tokenizer_json(rule, template)
    for values in CONFIGS:
        config = {n: v for n, v in zip(NAMES, values, strict=True) if v is not None}
        write(tmp_path, state, "llama", tokenizer_class="LlamaTokenizerFast", **config)
        assert_same(tmp_path, config)


@pytest.mark.parametrize("model_type", [None, "llama", "mistral"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "PreTrainedTokenizerFast", None])
def test_other_classes_use_tokenizer_json_unchanged(
    tmp_path: Path, name: str | None, model_type: str | None
) -> None:
    """So does a Mistral model that names Llama's class."""
    config = {} if name is None else {"tokenizer_class": name}
    state = tokenizer_json("always", template=False)
    write(tmp_path, state, model_type, add_prefix_space=False, add_bos_token=True, **config)
    assert_same(tmp_path)


def test_byte_level_file_is_not_read_as_a_llama_tokenizer(tmp_path: Path) -> None:
    """The files of Llama 3 name the Llama class as well."""
    state = json.loads(tiny.byte_level().to_str())
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": None}
    config["tokenizer_class"] = "LlamaTokenizerFast"
    write(tmp_path, state, "llama", **config, add_prefix_space=False, add_bos_token=True)
    assert_same(tmp_path)
