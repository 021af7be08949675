"""The lower bound of a text's number of tokens never exceeds the number of tokens."""

import json
import random
import time

import pytest
import tokenizers as tk
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from quire.render.tokens.text_bound import text_bound
from tests.support.render import golden_vocabularies as vocabularies
from tests.support.render import tiny_tokenizers as tiny

PIECES = [
    "a", " ", "   ", "\n", "fox ", "The quick ", "K", "\u1100\u1161\u11a8", "e\u0301", "1234",
    "你好", "🙂", "<|im_end|>", "</s>", "<s> ", "\u2581", "\u3000", "\x85", "zz", "....", "<0x41>",
    "\u1f00\u0301\u0345", "\u1fef", "\u200b", "\t",
]  # fmt: skip


def backends() -> dict[str, tk.Tokenizer]:
    strips = tiny.byte_level()
    strips.add_special_tokens([AddedToken("<|end|>", rstrip=True, lstrip=True)])
    composed = tiny.byte_level()
    composed.normalizer = normalizers.NFC()
    return {
        "byte_level": tiny.byte_level(),
        "llama": tiny.llama(),
        "gemma": tiny.gemma(),
        "llama3": vocabularies.llama3(),
        "qwen3": vocabularies.qwen3(),
        "mistral": vocabularies.mistral(),
        "strips": strips,
        "composed": composed,
    }


@pytest.mark.parametrize("name", list(backends()))
def test_bound_never_exceeds_the_number_of_tokens(name: str) -> None:
    backend = backends()[name]
    bound, source = text_bound(backend), random.Random(7)
    assert bound is not None
    pieces = [*PIECES, "<|end|>"] + sorted(backend.get_vocab(), key=len)[-8:]
    for _ in range(600):
        few = source.sample(pieces, source.randint(1, 4))
        text = "".join(source.choices(few, k=source.randint(0, 40)))
        num = len(backend.encode(text, add_special_tokens=False).ids)
        assert bound.at_least(text) <= num, text


def test_bound_of_a_very_long_text_is_high_enough_to_be_useful() -> None:
    """The bound is at least the text's length divided by three times the longest token."""
    for name, backend in backends().items():
        bound = text_bound(backend)
        assert bound is not None
        assert bound.at_least("a" * 100_000) >= 100_000 // (bound.longest * 3), name


def test_spaces_that_a_token_absorbs_do_not_raise_the_bound() -> None:
    backend = backends()["strips"]
    text = "<|end|>" + " " * 10_000
    assert len(backend.encode(text).ids) == 1
    bound = text_bound(backend)
    assert bound is not None
    assert bound.at_least(text) <= 1 < bound.at_least("x" * 1000)


def test_bound_allows_for_unicode_composition() -> None:
    """NFC shortens these texts to as little as a third of their bytes."""
    backend = backends()["composed"]
    bound = text_bound(backend)
    assert bound is not None
    for piece in ("\u1100\u1161\u11a8", "\u03b1\u0313\u0301\u0345", "\u1fef", "\u212a"):
        text = piece * 1000
        composed = backend.normalizer.normalize_str(text)
        assert len(text.encode()) <= 3 * len(composed.encode())
        assert bound.at_least(text) <= len(backend.encode(text).ids)


def test_tokenizers_that_may_drop_parts_of_a_text_have_no_bound() -> None:
    split = pre_tokenizers.Split(" ", "removed")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    state = json.loads(tiny.byte_level().to_str())
    del state["model"]["vocab"]["Ġ"]  # a byte without a token is dropped
    state["model"]["merges"] = []
    state["model"]["vocab"] = {t: i for t, i in state["model"]["vocab"].items() if "Ġ" not in t}
    for backend in (
        tiny.metaspace(),  # unknown words of any length are one token
        tiny.wordpiece(),
        tk.Tokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        tiny.byte_level(normalizer=normalizers.Strip()),
        tiny.byte_level(normalizer=normalizers.Replace(tk.Regex(" +"), " ")),
        tiny.byte_level(pre_tokenizer=pre_tokenizers.Sequence([split, level])),
        tiny.byte_level(pre_tokenizer=pre_tokenizers.Whitespace(), decoder=decoders.ByteLevel()),
        tk.Tokenizer.from_str(json.dumps(state)),
    ):
        assert text_bound(backend) is None


def test_bound_costs_little_compared_with_tokenizing() -> None:
    backend = tiny.byte_level()
    bound = text_bound(backend)
    assert bound is not None
    text = "The quick brown fox. " * 20_000
    start = time.process_time()
    assert bound.at_least(text) > 4_000
    judged = time.process_time() - start
    start = time.process_time()
    backend.encode(text)
    assert judged * 5 < time.process_time() - start
