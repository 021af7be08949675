"""A long text that is tokenised in parts gets the ids of the whole text."""

import random
from collections.abc import Callable

import pytest
import tokenizers as tk
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from quire.models.checkpoint.source import resolve_model
from quire.render.tokens import cuts, tokenizer
from quire.render.tokens.cuts import read_cuts
from quire.render.tokens.known_parts import KnownParts
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import TokenizerFiles
from tests.support.render import golden_vocabularies as vocabularies
from tests.support.render import tiny_tokenizers as tiny

PIECES = [
    "fox", "The", "a", "b", " ", "  ", "\n", "\n\n", "\t", ".", ",", "you're", "12", "3.5", "-",
    "naïve", "e\u0301", "你好", "。", "🙂", "\u0301", "\u2581", "\xa0", "<s>", "</s>", "<|im_end|>",
    "<tool_call>", "<0x41>", "\r\n", "_", "x y", "don't stop", "\u3000", "K", "'s", "<|end|>",
]  # fmt: skip


def split_at_words(joined: tk.Tokenizer) -> tk.Tokenizer:
    """Return a tiny tokenizer without the tokens that hold several words."""
    import json

    state = json.loads(joined.to_str())
    vocabulary = state["model"]["vocab"]
    kept = [token for token in vocabulary if "\u2581" not in token.lstrip("\u2581")]
    state["model"]["vocab"] = {token: i for i, token in enumerate(kept)}
    pairs = [m.split(" ") if isinstance(m, str) else m for m in state["model"]["merges"]]
    known = state["model"]["vocab"]
    state["model"]["merges"] = [
        [a, b] for a, b in pairs if a in known and b in known and a + b in known
    ]
    for token in state["added_tokens"]:
        token["id"] = known[token["content"]]
    processor = state.get("post_processor")
    if processor:
        for token in processor.get("special_tokens", {}).values():
            token["ids"] = [known[token["id"]]]
    return tk.Tokenizer.from_str(json.dumps(state))


def metaspace(scheme: str) -> tk.Tokenizer:
    backend = split_at_words(tiny.llama())
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", scheme, split=scheme == "never")
    return backend


def demo() -> tk.Tokenizer:
    return tk.Tokenizer.from_file(str(resolve_model("demo").directory / "tokenizer.json"))


def surrounded() -> tk.Tokenizer:
    template = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 0), ("<|im_end|>", 1)]
    )
    return tiny.byte_level(post_processor=template, normalizer=normalizers.NFC())


CUT: dict[str, Callable[[], tk.Tokenizer]] = {
    "demo": demo,
    "byte_level": tiny.byte_level,
    "prefixed": lambda: tiny.byte_level(
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "surrounded": surrounded,
    "digits": lambda: tiny.byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "llama3": vocabularies.llama3,
    "qwen3": vocabularies.qwen3,
    "llama": lambda: split_at_words(tiny.llama()),
    "gemma": lambda: split_at_words(tiny.gemma()),
    "first": lambda: metaspace("first"),
    "always": lambda: metaspace("always"),
    "never": lambda: metaspace("never"),
}


def with_token(text: str, backend: tk.Tokenizer | None = None, **flags: bool) -> tk.Tokenizer:
    backend = backend or tiny.byte_level()
    backend.add_tokens([AddedToken(text, **flags)])
    return backend


WHOLE: dict[str, Callable[[], tk.Tokenizer]] = {
    "words joined": tiny.llama,
    "not merged": tiny.metaspace,
    "wordpiece": tiny.wordpiece,
    "unknown rule": lambda: tiny.byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(tk.Regex("[a-z ]+"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "no words": lambda: tiny.byte_level(
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ),
    "digits alone": lambda: tiny.byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "lowercase": lambda: tiny.byte_level(normalizer=normalizers.Strip()),
    "token of two words": lambda: with_token("two words"),
    "token that takes a blank": lambda: with_token("word", rstrip=True),
    "token with a blank": lambda: with_token(" word"),
    "word as a token": lambda: with_token("word", split_at_words(tiny.llama())),
    "no merges": lambda: tk.Tokenizer(models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("name", list(CUT))
def test_ids_of_the_parts_equal_those_of_the_whole_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = CUT[name]()
    assert read_cuts(backend) is not None
    for module in (cuts, tokenizer):
        monkeypatch.setattr(module, "PART_CHARS", 4)
    known = Tokenizer(backend, TokenizerFiles(tiny.directory("llama")))
    rng, num_parts = random.Random(5), 0
    for _ in range(200):
        few = rng.sample(PIECES, rng.randint(1, 8)) + ["fox", " ", "a b"]
        text = "".join(rng.choices(few, k=rng.randint(0, 40)))
        for special in (True, False):
            whole = backend.encode(text, add_special_tokens=special).ids
            assert known.encode(text, special) == whole, repr(text)
        assert known._cuts is not None
        num_parts += len(known._cuts.parts(text))
    assert num_parts > 500


def test_continued_conversation_tokenizes_only_its_new_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = vocabularies.qwen3()
    known = Tokenizer(backend, TokenizerFiles(tiny.directory("llama")))
    tokenized: list[str] = []
    encode = known._encode
    monkeypatch.setattr(
        known, "_encode", lambda text, special: tokenized.append(text) or encode(text, special)
    )
    words = "the fox jumps over a dog " * 300
    turns = [f"<|im_start|>user\n{words}{i}<|im_end|>\n" for i in range(3)]
    for i in range(1, 4):
        tokenized.clear()
        text = "".join(turns[:i])
        assert known.encode(text, False) == backend.encode(text, add_special_tokens=False).ids
        assert sum(map(len, tokenized)) <= len(turns[0]) + 3 * cuts.PART_CHARS
    other = turns[2] + turns[0]  # known parts in another order
    assert known.encode(other, False) == backend.encode(other, add_special_tokens=False).ids


def test_short_new_turn_tokenizes_little_known_text_again(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Tokenizer(vocabularies.qwen3(), TokenizerFiles(tiny.directory("llama")))
    before, now = "the fox jumps over a dog " * 1000, "and a cat " * 10
    known.encode(before)
    encode, tokenized = known._encode, list[str]()
    monkeypatch.setattr(
        known, "_encode", lambda text, special: tokenized.append(text) or encode(text, special)
    )
    known.encode(before + now)
    assert sum(map(len, tokenized)) <= 1200 + len(now)


def test_cache_of_known_parts_is_bounded() -> None:
    parts = KnownParts(max_chars=10)
    parts.add("abcd", [1, 2])
    parts.add("efgh", [3])
    assert parts.find("abcd") == [1, 2]
    parts.add("ijkl", [4])
    assert parts.find("efgh") is None  # the least recently used one
    assert parts.find("abcd") == [1, 2] and parts.find("ijkl") == [4]
    parts.add("ijkl", [5])
    assert parts.find("abcd") == [1, 2] and parts.find("ijkl") == [5]
    parts.add("m" * 11, [6])
    assert parts.find("m" * 11) is None and parts.find("abcd") == [1, 2]


@pytest.mark.parametrize("name", list(WHOLE))
def test_tokenizers_without_provably_safe_cuts_have_none(name: str) -> None:
    assert read_cuts(WHOLE[name]()) is None


def test_text_is_split_only_at_safe_cuts() -> None:
    found = read_cuts(tiny.byte_level())
    assert found is not None
    assert found.parts("a" * 1_000_000) == ["a" * 1_000_000]
    words = "word " * 200_000
    parts = found.parts(words)
    assert "".join(parts) == words
    assert max(map(len, parts)) <= 3 * cuts.PART_CHARS
