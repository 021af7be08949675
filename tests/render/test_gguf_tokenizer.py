"""A tokenizer gives the same ids from a GGUF file as from its own directory."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ModelError
from quire.models.checkpoint.source import resolve_model
from quire.render.generation import read_generation_defaults
from quire.render.renderer import Renderer
from quire.render.tokens.gguf_tokenizer import gguf_generation
from quire.render.tokens.pre_tokenizers import CASED
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import has_tokenizer
from quire.spec.gguf.container import GGUFFile
from tests.support.models.gguf_writer import byte_level_metadata, write_gguf
from tests.support.render.tiny_tokenizers import CORPUS, directory

MESSAGES = [{"role": "user", "content": "Hello, what's 12 + 345?"}]
ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz      ",
    "The Quick BROWN fox's we'LL don't I'M they'Ve  ",
    "0123456789 .,;:!?+-*/=()[]{}<>|~^$#@&%`'\"\\_",
    " \n\t\r  \n\n",
    "你好世界天气日本語テキスト한국어문장ÄäÖöÜüßéèñçøåАБВабвالعربية",
    "e\u0301a\u0308²½Ⅷ٣\u200d\u00a0\u3000😀👩\u200d👩ﬁ①",
)


def texts(count: int = 400, seed: int = 1) -> list[str]:
    """Return texts of words and of characters of many scripts, at random."""
    numbers = random.Random(seed)
    words = [word for line in CORPUS for word in line.split(" ")]
    found = ["", " ", "  a", "\n", "▁", "a▁b"]
    for _ in range(count):
        parts = []
        for _ in range(numbers.randrange(1, 6)):
            letters = numbers.choice(ALPHABETS)
            parts.append("".join(numbers.choices(letters, k=numbers.randrange(1, 9))))
            parts.append(numbers.choice(words) + numbers.choice(("", " ")))
        found.append("".join(parts))
    return found


def split(pattern: str) -> dict[str, Any]:
    pattern_ = {"Regex": pattern}
    return {"type": "Split", "pattern": pattern_, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool) -> dict[str, Any]:
    prefix = {"add_prefix_space": False, "trim_offsets": True}
    return {"type": "ByteLevel", "use_regex": use_regex} | prefix


DIGITS = {"type": "Digits", "individual_digits": True}
QWEN = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
LLAMA3 = QWEN.replace("|\\p{N}|", "|\\p{N}{1,3}|")
TEKKEN = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
OMITTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT4O = (
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    f"{OMITTED}"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    f"{OMITTED}"
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
CODER = ["[\\r\\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
DEEPSEEK = [
    "[\\r\\n]",
    f"\\s?[{CASED}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    "\\s+$",
    "[一-龥ࠀ-一가-퟿]+",
]
DEEPSEEK_V3 = [
    "\\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
# From published tokenizer.json files, by kind: pre-tokenizers, normalizer, ignore_merges.
AS_PUBLISHED: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None, bool]] = {
    "gpt-2": ([byte_level(True)], None, False),
    "smollm": ([DIGITS, byte_level(True)], None, False),
    "qwen2": ([split(QWEN), byte_level(False)], {"type": "NFC"}, False),
    "llama-bpe": ([split(LLAMA3), byte_level(False)], None, True),
    "tekken": ([split(TEKKEN), byte_level(False)], None, True),
    "gpt-4o": ([split(GPT4O), byte_level(False)], None, False),
    "dbrx": ([split(LLAMA3), byte_level(False)], None, False),
    "glm4": ([split(LLAMA3), byte_level(False)], None, True),
    "command-r": ([DIGITS, byte_level(True)], {"type": "NFC"}, False),
    "olmo": ([byte_level(True)], {"type": "NFC"}, False),
    "deepseek-coder": ([*map(split, CODER), DIGITS, byte_level(False)], None, False),
    "deepseek-llm": ([*map(split, DEEPSEEK), DIGITS, byte_level(False)], None, False),
    "deepseek-v3": ([*map(split, DEEPSEEK_V3), byte_level(False)], None, False),
}


def published(folder: Path, source: Path, kind: str) -> Path:
    """Return a directory with the vocabulary of `source` and the rules of a kind."""
    state = json.loads((source / "tokenizer.json").read_text())
    parts, normalizer, ignore_merges = AS_PUBLISHED[kind]
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": parts}
    state["normalizer"] = normalizer
    state["model"]["ignore_merges"] = ignore_merges
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return folder


@pytest.fixture(params=["tiny", "demo"])
def vocabulary(request: pytest.FixtureRequest) -> Path:
    return directory("byte_level") if request.param == "tiny" else resolve_model("demo").directory


@pytest.mark.parametrize("kind", AS_PUBLISHED)
def test_byte_level_ids_equal_those_of_the_directory(
    tmp_path: Path, vocabulary: Path, kind: str
) -> None:
    """No kind adds a bos token, since neither vocabulary has one."""
    folder = published(tmp_path / "published", vocabulary, kind)
    path = write_gguf(tmp_path / "model.gguf", byte_level_metadata(folder, kind))
    ours, expected = Tokenizer.from_directory(path), Tokenizer.from_directory(folder)
    assert ours.vocab_size == expected.vocab_size
    assert ours.special_ids == expected.special_ids
    assert ours.added_tokens == expected.added_tokens
    for text in [*texts(), "<|im_start|>user\nHi<|im_end|>\n<tool_call>x</tool_call><|im_"]:
        ids = ours.encode(text)
        assert ids == expected.encode(text), repr(text)
        for skip in (False, True):
            assert ours.decode(ids, skip) == expected.decode(ids, skip)
        if AS_PUBLISHED[kind][1] is None:  # NFC composes characters
            assert ours.decode(ids) == text


def test_file_without_a_pre_tokenizer_gets_the_default_of_llama_cpp(tmp_path: Path) -> None:
    """The default splits off punctuation and groups of three digits."""
    metadata = byte_level_metadata(directory("byte_level"))
    del metadata["tokenizer.ggml.pre"]
    ours = Tokenizer.from_directory(write_gguf(tmp_path / "model.gguf", metadata))
    for text in texts(100):
        assert ours.decode(ours.encode(text)) == text
    parts = ["", " and", "==", " the", " dog", ".", "123", "45"]
    together = [token_id for part in parts if part for token_id in ours.encode(part)]
    assert ours.encode("".join(parts)) == together


def test_special_tokens_and_chat_text_equal_those_of_the_directory(tmp_path: Path) -> None:
    demo = resolve_model("demo").directory
    path = write_gguf(tmp_path / "model.gguf", byte_level_metadata(demo, "qwen2"))
    assert has_tokenizer(path)
    ours, expected = Renderer.from_directory(path), Renderer.from_directory(demo)
    assert ours.tokenizer is not None and expected.tokenizer is not None
    assert ours.tokenizer.eos_token_id == expected.tokenizer.eos_token_id == 2
    assert ours.tokenizer.bos_token_id is None
    assert ours.tokenizer.chat_templates == expected.tokenizer.chat_templates
    assert ours.chat_text(MESSAGES) == expected.chat_text(MESSAGES)


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (["a", "<|end|>", "<|endoftext|>"], (1, 2)),
        (
            ["a", "<|end|>", "<|return|>", "<|call|>"],
            (2, 3),
        ),  # <|end|> ends a message, not the turn
        (["<|end|>", "<end_of_turn>", "</s>"], (0, 1)),
    ],
)
def test_tokens_that_end_a_turn_are_found_by_their_text(
    tmp_path: Path, texts: list[str], ends: tuple[int, ...]
) -> None:
    kinds = [3 if text.startswith("<") else 1 for text in texts]
    metadata = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}
    file = GGUFFile(write_gguf(tmp_path / "model.gguf", metadata))
    assert tuple(gguf_generation(file)["eos_token_id"]) == ends


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "with"}
    extra = {"tokenizer.chat_template": "usual"} | named
    metadata = byte_level_metadata(directory("byte_level")) | extra
    ours = Tokenizer.from_directory(write_gguf(tmp_path / "model.gguf", metadata))
    assert ours.chat_templates == {"default": "usual", "tool_use": "with"}


@pytest.mark.parametrize(
    ("kind", "flags", "expected"),
    [
        ("gpt-2", {}, (False, False)),
        ("llama-bpe", {}, (True, False)),
        ("llama-bpe", {"add_bos_token": False}, (False, False)),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, (True, True)),
    ],
)
def test_bos_and_eos_are_added_by_kind_and_flags(
    tmp_path: Path, kind: str, flags: Mapping[str, bool], expected: tuple[bool, bool]
) -> None:
    ids = {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.eos_token_id": 1}
    extra = ids | {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    metadata = byte_level_metadata(directory("byte_level"), kind) | extra
    ours = Tokenizer.from_directory(write_gguf(tmp_path / "model.gguf", metadata))
    plain = ours.encode("Hello", add_special_tokens=False)
    before, after = [2] if expected[0] else [], [1] if expected[1] else []
    assert ours.encode("Hello") == before + plain + after
    assert (ours.bos_token_id, ours.eos_token_id) == (2, 1)


def test_unused_tokens_are_not_in_the_vocabulary(tmp_path: Path) -> None:
    metadata = byte_level_metadata(directory("byte_level"))
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += ["[PAD1]", "[PAD2]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    ours = Tokenizer.from_directory(write_gguf(tmp_path / "model.gguf", metadata))
    assert (ours.token(size), ours.decode([size, size + 1])) == (None, "")


def test_embedded_tokenizer_json_is_used(tmp_path: Path) -> None:
    """GGUF has no name for the rule by which the demo splits words."""
    demo = resolve_model("demo").directory
    whole = (demo / "tokenizer.json").read_text()
    path = write_gguf(tmp_path / "model.gguf", {"tokenizer.huggingface.json": whole})
    assert has_tokenizer(path)
    ours, expected = Tokenizer.from_directory(path), Tokenizer.from_directory(demo)
    assert [ours.encode(text) for text in texts()] == [expected.encode(text) for text in texts()]


# ---- SentencePiece's vocabularies ------------------------------------------------------------


def pieces() -> dict[str, int]:
    vocabulary = json.loads((directory("llama") / "tokenizer.json").read_text())["model"]["vocab"]
    return dict(sorted(vocabulary.items(), key=lambda item: item[1]))


def kind_of(text: str) -> int:
    if text.startswith("<0x"):
        return 6
    return 2 if text == "<unk>" else 3 if text in ("<s>", "</s>") or "_of_turn" in text else 1


def sentence_piece_metadata(**extra: Any) -> dict[str, Any]:
    vocabulary = pieces()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(vocabulary),
        "tokenizer.ggml.scores": [-float(token_id) for token_id in vocabulary.values()],
        "tokenizer.ggml.token_type": [kind_of(text) for text in vocabulary],
    } | {f"tokenizer.ggml.{name}": value for name, value in extra.items()}


def merged_greedily(text: str, vocabulary: Mapping[str, int]) -> list[int]:
    """Encode a text as SentencePiece and llama.cpp do.

    Merge the neighbours whose union scores highest, until none is a token. Write the other
    symbols as bytes."""
    symbols = list(text)
    while True:
        unions = [(a + b, i) for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False))]
        known = [(vocabulary[u], i) for u, i in unions if kind_of(u) == 1 and u in vocabulary]
        if not known:
            break
        _, at = min(known)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        if symbol in vocabulary:
            ids.append(vocabulary[symbol])
        else:
            ids += [vocabulary[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_follow_the_scores(tmp_path: Path, prefix: bool) -> None:
    metadata = sentence_piece_metadata(add_space_prefix=prefix)
    ours = Tokenizer.from_directory(write_gguf(tmp_path / "model.gguf", metadata))
    vocabulary = pieces()
    for text in texts():
        written = text.replace(" ", "▁")
        if prefix and text:
            written = "▁" + written
        ids = ours.encode(text)
        assert ids == [1, *merged_greedily(written, vocabulary)], repr(text)
        assert ours.decode(ids, skip_special_tokens=True) == text.replace("▁", " ")


def test_sentencepiece_special_tokens_default_to_those_of_llama_2(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", sentence_piece_metadata())
    ours = Tokenizer.from_directory(path)
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)
    assert ours.named_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.special_ids == {0, 1, 2, 3, 4}
    inside = ours.encode("<start_of_turn>user", add_special_tokens=False)
    assert inside[0] == 3 and ours.decode(inside, skip_special_tokens=True) == "user"
    assert ours.pieces is not None
    changed = sentence_piece_metadata(bos_token_id=3, add_bos_token=False, add_eos_token=True)
    ours = Tokenizer.from_directory(write_gguf(path, changed))
    assert (ours.bos_token_id, ours.encode("a")[-1]) == (3, 2)


# ---- generation defaults and errors ----------------------------------------------------------


def test_end_tokens_and_sampling_defaults_are_read(tmp_path: Path) -> None:
    metadata = byte_level_metadata(directory("byte_level")) | {
        "tokenizer.ggml.eot_token_id": 5,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
    }
    path = write_gguf(tmp_path / "model.gguf", metadata)
    found = read_generation_defaults(path, tokenizer_eos=1)
    assert found.eos_token_ids == (1, 5, 2)  # <|im_end|>, the file's eot, <|endoftext|>
    assert found.sampling == {"temperature": 0.5, "top_k": 20}
    assert read_generation_defaults(path, use_sampling=False).sampling == {}
    write_gguf(path, metadata | {"general.sampling.temp": -1.0})
    with pytest.raises(ModelError, match="sampling defaults that do not work"):
        read_generation_defaults(path)


def test_gguf_file_may_lack_a_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"})
    assert not has_tokenizer(path)
    assert Renderer.from_directory(path).tokenizer is None
    assert read_generation_defaults(path).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'; supported are gpt2 and llama"),
        ({"tokenizer.ggml.pre": "own"}, "by the rule 'own'; supported are default, gpt-2"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "tokens, but types of 2"),
        ({"tokenizer.ggml.model": "llama"}, "tokens, but 0 scores"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "must be an array of texts"),
        ({"tokenizer.huggingface.json": "{}"}, "a tokenizer that cannot be used"),
        ({"tokenizer.chat_template": 3}, "chat_template must be a text"),
    ],
)
def test_unsupported_tokenizers_are_rejected(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    metadata = byte_level_metadata(directory("byte_level")) | change
    path = write_gguf(tmp_path / "model.gguf", metadata)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_directory(path)
