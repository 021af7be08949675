"""Incremental detokenisation equals decoding at once, for any text and any split.

Covers `render/tokens/pieces.py`.
"""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.base.requests.sampling_params import SamplingParams
from quire.render.tokens.detokenizer import IncrementalDetokenizer, open_stream
from quire.render.tokens.pieces import PieceStream
from quire.render.tokens.token_stream import WindowStream
from quire.render.tokens.tokenizer import Tokenizer
from tests.support.render.tiny_tokenizers import FAMILIES, tokenizer

BROKEN = "\ufffd"
SOME = [
    "你好",
    "日本語",
    "🙂",
    "👩‍👩‍👧",
    "🇩🇪",
    "e\u0301",
    "ก็",
    "é",
    " ",
    "  ",
    "\n",
    "a",
    "the",
    "dog",
    "'s",
    " STOP",
]
texts = st.lists(st.one_of(st.sampled_from(SOME), st.text(max_size=4)), max_size=12).map("".join)
fast = settings(max_examples=60, deadline=None)


def shown(tok: Tokenizer, ids: list[int], cuts: list[int], params: SamplingParams) -> list[str]:
    """Return the chunks of text as ids arrive a few at a time; the last chunk is flushed."""
    detokenizer = IncrementalDetokenizer(tok, params)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [detokenizer.update(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts, cuts=st.lists(st.integers(0, 60), max_size=20), skip=st.booleans())
@example(text="🙂🙃", cuts=list(range(60)), skip=True)
@example(text=" leading", cuts=[1], skip=True)
@example(text="", cuts=[], skip=True)
@fast
def test_chunks_join_to_the_decoded_text(
    family: str, text: str, cuts: list[int], skip: bool
) -> None:
    tok = tokenizer(family)
    ids = tok.encode(text)
    pieces = shown(tok, ids, cuts, SamplingParams(skip_special_tokens=skip))
    assert "".join(pieces) == tok.decode(ids, skip_special_tokens=skip)
    if BROKEN not in text:
        assert all(BROKEN not in piece for piece in pieces)


@pytest.mark.parametrize("family", ["byte_level", "metaspace"])
@given(data=st.data(), skip=st.booleans())
@fast
def test_chunks_of_arbitrary_ids_join_to_the_decoded_text(
    family: str, data: st.DataObject, skip: bool
) -> None:
    """The ids include broken UTF-8, special tokens and ids outside of the vocabulary."""
    tok = tokenizer(family)
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 3), max_size=30))
    pieces = shown(tok, ids, list(range(60)), SamplingParams(skip_special_tokens=skip))
    assert "".join(pieces) == tok.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", ["llama", "gemma"])
@given(data=st.data())
@fast
def test_broken_byte_tokens_are_shown_as_decode_shows_them(
    family: str, data: st.DataObject
) -> None:
    """This holds even if a run of byte tokens is invalid from its first byte on."""
    tok = tokenizer(family)
    lone = [tok.token_id(f"<0x{byte:02X}>") for byte in (0xC3, 0xE4, 0xF0, 0xFF)]
    word = tok.encode("dog", add_special_tokens=False)
    parts = data.draw(st.lists(st.sampled_from([[i] for i in lone] + [word]), max_size=8))
    ids = [token_id for part in parts for token_id in part]
    pieces = shown(tok, ids, list(range(60)), SamplingParams())
    assert "".join(pieces) == tok.decode(ids, skip_special_tokens=True)


def test_complete_characters_before_broken_bytes_are_kept() -> None:
    tok = tokenizer("llama")
    ids = [tok.token_id(f"<0x{byte:02X}>") for byte in (0xE4, 0xBD, 0xA0, 0xE4)]
    detokenizer = IncrementalDetokenizer(tok)
    assert detokenizer.update(ids) + detokenizer.flush() == "你" + BROKEN


@pytest.mark.parametrize("family", FAMILIES)
@given(text=texts, at=st.integers(0, 60))
@fast
def test_stream_that_starts_after_a_prompt_continues_its_text(
    family: str, text: str, at: int
) -> None:
    tok = tokenizer(family)
    ids = tok.encode(text.replace(BROKEN, ""))
    at %= len(ids) + 1
    plain, after_prompt = open_stream(tok), open_stream(tok, ids[:at])
    for token_id in ids[:at]:
        plain.push(token_id)
    for token_id in ids[at:]:
        assert after_prompt.push(token_id) == plain.push(token_id)
    assert after_prompt.flush() == plain.flush()


@pytest.mark.parametrize("family", ["byte_level", "llama", "metaspace"])
@given(text=texts)
@fast
def test_table_and_window_streams_give_the_same_text(family: str, text: str) -> None:
    tok = tokenizer(family)
    assert tok.pieces is not None
    streams = [PieceStream(tok.pieces, frozenset()), WindowStream(tok, frozenset())]
    ids = tok.encode(text.replace(BROKEN, ""))
    table, window = ("".join(s.push(i) for i in ids) + s.flush() for s in streams)
    assert table == window


def test_wordpiece_tokenizer_has_no_table_of_pieces() -> None:
    assert tokenizer("wordpiece").pieces is None


def test_window_stream_does_not_hold_back_broken_text_forever() -> None:
    tok = tokenizer("byte_level")
    half = tok.encode("🙂", add_special_tokens=False)[0]
    stream = WindowStream(tok, frozenset())
    assert "".join(stream.push(half) for _ in range(120)).startswith(BROKEN)


def test_spaces_between_special_tokens_can_be_omitted() -> None:
    tok = tokenizer("wordpiece")
    ids = [tok.token_id(token) or 0 for token in ("[A]", "[B]")]
    apart = SamplingParams(skip_special_tokens=False)
    together = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert IncrementalDetokenizer(tok, apart).update(ids) == "[A] [B]"
    assert IncrementalDetokenizer(tok, together).update(ids) == "[A][B]"


def test_leading_space_is_kept_after_a_prompt() -> None:
    tok = tokenizer("llama")
    prompt, word = tok.encode("Hello"), tok.encode("world", add_special_tokens=False)
    assert IncrementalDetokenizer(tok).update(word) == "world"
    assert IncrementalDetokenizer(tok, None, prompt).update(word) == " world"


def test_peek_changes_nothing_and_shows_special_tokens() -> None:
    tok = tokenizer("byte_level")
    first, *rest = tok.encode("🙂")
    end = tok.eos_token_id or 0
    stream = open_stream(tok)
    assert stream.peek(end) == "<|im_end|>" and stream.push(end) == ""
    assert stream.peek(first) == "" == stream.peek(first)
    assert stream.push(first) == ""
    text = "".join(stream.push(token_id) for token_id in rest)
    assert text == "🙂" and stream.flush() == ""
