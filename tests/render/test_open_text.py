"""Text that arrives in chunks gives the tokens of the whole text, however it is split."""

import json
import random
from functools import cache
from pathlib import Path

import pytest

from quire.base.errors import RequestError
from quire.models.checkpoint.source import resolve_model
from quire.render.tokens.open_text import OpenText
from quire.render.tokens.tokenizer import Tokenizer
from tests.support.render.tiny_tokenizers import byte_level, tokenizer

# Without the tiny llama and gemma, whose vocabularies have tokens across words.
NAMES = ("demo", "byte_level", "metaspace", "wordpiece")
WORDS = (
    "Once", "upon", "a", "time,", "don't", "end.", "\n", "\n\n", " ", "\t", "12", "3.5", "\r\n",
    "<tool_call>", "<|im_end|>", "你好。", "世界", "naïve", "🙂", "_x", "x_", "(y)", "--",
)  # fmt: skip


@cache
def named(name: str) -> Tokenizer:
    if name == "demo":
        return Tokenizer.from_directory(resolve_model("demo").directory)
    return tokenizer(name)


def byte_level_directory(folder: Path, config: dict[str, object]) -> Tokenizer:
    """Write vocab.json and merges.txt only, so that the config decides on bos and eos."""
    byte_level().model.save(str(folder))
    values = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return Tokenizer.from_directory(folder)


def in_pieces(text: OpenText, whole: str, rng: random.Random) -> list[int]:
    token_ids, start = [], 0
    while start < len(whole):
        end = start + rng.randint(1, 12)
        token_ids += text.add(whole[start:end])
        start = end
    return token_ids + text.close()


@pytest.mark.parametrize("name", NAMES)
def test_random_chunks_give_the_tokens_of_the_whole_text(name: str) -> None:
    rng, known = random.Random(7), named(name)
    for _ in range(500):
        words = [rng.choice(WORDS) + rng.choice((" ", "", "  ")) for _ in range(rng.randint(1, 20))]
        whole = "".join(words)
        assert in_pieces(OpenText(known), whole, rng) == known.encode(whole), repr(whole)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_bos_and_eos_are_added_once(tmp_path, bos: bool, eos: bool) -> None:
    flags = {"bos_token": "<|im_start|>", "add_bos_token": bos, "add_eos_token": eos}
    known = byte_level_directory(tmp_path, flags)
    rng, whole = random.Random(1), "The quick brown fox jumps over the lazy dog."
    for special in (True, False):
        found = in_pieces(OpenText(known, special), whole, rng)
        assert found == known.encode(whole, add_special_tokens=special)


def test_only_the_last_word_is_held_back() -> None:
    known = named("demo")
    text = OpenText(known)
    assert text.add("Once upon a ti") == known.encode("Once upon a")
    assert text.num_held_chars == 3
    assert text.add("me") == []
    assert text.add(" ") == known.encode(" time")
    assert text.add("") == []
    assert text.close() == known.encode(" ")
    assert text.close() == []


def test_adding_token_ids_releases_the_held_text(tmp_path) -> None:
    flags = {"bos_token": "<|im_start|>", "add_bos_token": True, "add_eos_token": True}
    known = byte_level_directory(tmp_path, flags)
    bos, eos = known.bos_token_id, known.eos_token_id
    text = OpenText(known)
    assert text.add("Hello wor") == [bos, *known.encode("Hello", False)]
    assert text.add_ids([7, 8]) == [*known.encode(" wor", False), 7, 8]
    assert text.add("ld ") + text.close() == [*known.encode("ld ", False), eos]
    text = OpenText(known)
    assert text.add_ids([7]) == [7]
    assert text.close() == []


def test_text_that_is_not_unicode_is_rejected() -> None:
    with pytest.raises(RequestError, match="Unicode"):
        OpenText(named("demo")).add("a\ud800 b")


def test_long_runs_are_scanned_once() -> None:
    """Scanning again from every position would take minutes."""
    text = OpenText(named("demo"))
    assert text.add(" " * 1_000_000) == []
    assert text.num_held_chars == 1_000_000
    assert text.add("<tool_call> " * 50_000) == []
    assert text.num_held_chars == 1_600_000
