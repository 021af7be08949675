"""llguidance and our own decoding agree on the text of every token."""

import re
import time
from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError, MissingDependency
from quire.engine.grammars.grammars import Grammars
from quire.engine.grammars.matchers import MaskRequest
from quire.engine.grammars.vocabulary import make_vocabulary, num_words
from quire.render.tokens.tokenizer import Tokenizer
from tests.support.render.tiny_tokenizers import tokenizer
from tests.support.scheduler.fake_device import make_request

DEMO = Path("src/quire/demo")


def load_tokenizer(family: str) -> Tokenizer:
    return Tokenizer.from_directory(DEMO) if family == "demo" else tokenizer(family)


@pytest.mark.parametrize("family", ["demo", "byte_level", "llama", "gemma"])
def test_bytes_of_every_token_agree(family: str) -> None:
    ours = load_tokenizer(family)
    vocabulary = make_vocabulary(ours, ours.vocab_size + 45, [1, 2])
    assert vocabulary.tokens.eos_tokens == [1, 2]
    assert ours.pieces is not None
    for token_id in range(ours.vocab_size):
        piece = ours.pieces.table[token_id]
        wanted = piece if isinstance(piece, bytes) else piece.encode()
        if token_id in ours.added_tokens:  # named by its id, never by its text
            assert vocabulary.tokens.is_special_token(token_id), token_id
            continue
        found = vocabulary.tokens.decode_bytes([token_id])
        assert found == (b"" if wanted == b"\xff" else wanted), (token_id, wanted)


@pytest.mark.parametrize("family", ["demo", "byte_level", "llama", "gemma"])
def test_mask_allows_exactly_the_tokens_that_may_begin_the_text(family: str) -> None:
    """Checked by brute force over all tokens, including tokens with equal bytes."""
    from llguidance import LLMatcher

    ours = load_tokenizer(family)
    size = ours.vocab_size + 45
    vocabulary = make_vocabulary(ours, size, [1, 2])
    matcher = LLMatcher(vocabulary.tokens, "%llguidance {}\nstart: /[a-t]{0,3}( [a-z]{2})?é?/\n")
    words = np.frombuffer(matcher.compute_bitmask(), np.int32)[: num_words(size)]
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:size]
    wanted = {1, 2}
    assert ours.pieces is not None
    for token_id in set(range(ours.vocab_size)) - ours.added_tokens.keys():
        piece = ours.pieces.table[token_id]
        data = piece if isinstance(piece, bytes) else piece.encode()
        if data and _may_begin(data):
            wanted.add(token_id)
    assert set(np.flatnonzero(bits).tolist()) == wanted


def _may_begin(data: bytes) -> bool:
    """Return whether a text of up to three letters, a space and two letters, and an accent may
    begin with these bytes."""
    low, high = b"abcdefghijklmnopqrst", b"abcdefghijklmnopqrstuvwxyz"
    ends = {(0, 0)}  # (part, letters of it)
    for byte in data:
        found = set()
        for part, num in ends:
            if part == 0 and byte in low and num < 3:
                found.add((0, num + 1))
            if part == 0 and byte == 0x20:
                found.add((1, 0))
            if part == 1 and byte in high and num < 2:
                found.add((1, num + 1))
            if byte == 0xC3 and (part == 0 or (part == 1 and num == 2)):
                found.add((2, 0))
            if part == 2 and num == 0 and byte == 0xA9:
                found.add((2, 1))
        ends = found
    return bool(ends)


def test_tokenizer_may_have_more_tokens_than_the_model() -> None:
    """The additional tokens are never allowed."""
    ours = load_tokenizer("demo")
    size = ours.vocab_size - 37
    grammars = Grammars(lambda: make_vocabulary(ours, size, [2]), size, 1, lambda: None)
    request = make_request("0", [1], grammar="%llguidance {}\nstart: /[a-z]+/\n")
    grammars.begin(request)
    while not grammars.has_answers:
        time.sleep(0.001)
    assert grammars.take()[0].error is None
    masks = grammars._masks.make(
        np.array([5], np.int32), [MaskRequest(5, grammars._guided["0"], 0, np.empty(0, np.int32))]
    )
    assert not masks.errors
    bits = np.unpackbits(masks.words[0, 0].view(np.uint8), bitorder="little")
    assert bits.any() and not bits[size:].any()
    letters = {i for i in range(3, size) if re.fullmatch("[a-z]+", ours.token(i) or "")}
    assert set(np.flatnonzero(bits).tolist()) == letters
    grammars.close()


def test_missing_requirements_of_grammars_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        make_vocabulary(None, 100, [1])
    with pytest.raises(ConfigError, match="needs an end token"):
        make_vocabulary(load_tokenizer("demo"), 2000, [])
    for family in ("wordpiece", "metaspace"):  # no generative model has these
        with pytest.raises(ConfigError, match="llguidance cannot read"):
            make_vocabulary(load_tokenizer(family), 2000, [1])
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingDependency, match="pip install llguidance"):
        make_vocabulary(load_tokenizer("demo"), 2000, [1])
