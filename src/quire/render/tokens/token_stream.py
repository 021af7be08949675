"""Convert tokens to text one at a time, without repeated decoding of the whole output.

Invariants: the joined results of `push` for a list of tokens, followed by `flush`, equal
`Tokenizer.decode` of the list. `push` never returns part of a character. One exception is an
improvement: if one byte token of a run is invalid, sentencepiece's decode drops the whole run; a
stream keeps the valid characters before it.

A stream may continue a prompt. Then a leading space stays, and a character that the prompt began is
returned whole.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.render.tokens.pieces import Pieces
from quire.render.tokens.tokenizer import Tokenizer

BROKEN = "\ufffd"
CONTEXT = 8  # last tokens of the prompt to consider; an unfinished character has at most 3 bytes
WINDOW = 24  # tokens decoded at once if there is no table


class TokenStream(Protocol):
    """Text of a growing list of tokens."""

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain."""

    def peek(self, token_id: int) -> str:
        """Return the text that this token would add, also if `push` skips it as special."""

    def flush(self) -> str:
        """Return the rest of an unfinished character."""


def open_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    shown_special_ids: Iterable[int] = (),
) -> TokenStream:
    """Return a stream that continues the prompt; by table if the decoder allows, else by window.

    shown_special_ids: special tokens that are not skipped."""
    skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
    skipped = skipped.difference(shown_special_ids)
    if tokenizer.pieces is not None:
        return PieceStream(tokenizer.pieces, skipped, prompt_token_ids)
    glue = skip_special_tokens or spaces_between_special_tokens
    return WindowStream(tokenizer, skipped, prompt_token_ids, glue)


class PieceStream:
    """Looks up the text of each token, and joins characters that span several tokens."""

    __slots__ = ("_at_start", "_byte_level", "_first", "_pending", "_skipped", "_strip", "_table")

    def __init__(
        self, pieces: Pieces, skipped: frozenset[int], prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._table = pieces.table
        self._byte_level = pieces.byte_level
        self._skipped = skipped
        self._pending = b""
        self._strip = pieces.strip
        self._first = pieces.first
        self._at_start = pieces.strip > 0 or pieces.first is not None
        for token_id in _context(prompt_token_ids, skipped, pieces):
            self._at_start = False
            self.push(token_id)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._table[token_id]
        if self._at_start:
            return self._begin(token_id, piece)
        if self._pending or piece.__class__ is bytes:
            return self._join(piece)
        return piece  # type: ignore[return-value]

    def peek(self, token_id: int) -> str:
        state = self._pending, self._strip, self._at_start, self._skipped
        self._skipped = frozenset()
        try:
            return self.push(token_id)
        finally:
            self._pending, self._strip, self._at_start, self._skipped = state

    def flush(self) -> str:
        pending, self._pending = self._pending, b""
        if self._byte_level:
            return pending.decode("utf-8", "replace")
        return BROKEN * len(pending)

    def _begin(self, token_id: int, piece: str | bytes) -> str:
        """Return the first text, without the space that the tokenizer prepended."""
        if self._first is not None:
            self._at_start = piece == ""
            return self._first(token_id)
        text = self._join(piece) if isinstance(piece, bytes) or self._pending else piece
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        self._at_start = self._strip > 0 and text == ""
        return text

    def _join(self, piece: str | bytes) -> str:
        if piece == "":
            return ""
        if self._byte_level:
            data = self._pending + (piece if isinstance(piece, bytes) else piece.encode())
            text, used = codecs.utf_8_decode(data, "replace", False)
            self._pending = data[used:]
            return text
        if isinstance(piece, str):
            return self.flush() + piece
        return self._join_byte(piece)

    def _join_byte(self, byte: bytes) -> str:
        """Append one byte; earlier bytes that it cannot continue are invalid."""
        try:
            data = self._pending + byte
            text, used = codecs.utf_8_decode(data, "strict", False)
            self._pending = data[used:]
            return text
        except UnicodeDecodeError:
            if not self._pending:
                return BROKEN
            return self.flush() + self._join_byte(byte)


def _context(prompt_token_ids: Sequence[int], skipped: frozenset[int], pieces: Pieces) -> list[int]:
    """Return the last CONTEXT tokens of the prompt that have text, in order."""
    found: list[int] = []
    for token_id in reversed(prompt_token_ids):
        if token_id not in skipped and pieces.table[token_id] != "":
            found.append(token_id)
            if len(found) == CONTEXT:
                break
    return found[::-1]


class WindowStream:
    """Decodes the last few tokens again for each token, for decoders without a table."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        skipped: frozenset[int],
        prompt_token_ids: Sequence[int] = (),
        spaces_between_added_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._glue = spaces_between_added_tokens
        self._ids = [i for i in prompt_token_ids if self._has_text(i)][-CONTEXT:]
        self._whole = 0  # number of ids whose characters were whole at the last push
        self._shown = tokenizer.decode(self._ids).rstrip(BROKEN)

    def push(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        text = self._text_with(token_id)
        self._ids.append(token_id)
        if text.endswith(BROKEN) and len(self._ids) < 4 * WINDOW:
            return ""
        new = self._new(text, token_id)
        if len(self._ids) >= WINDOW:
            self._ids = self._ids[self._whole :]
            text = self._tokenizer.decode(self._ids)
        self._whole = len(self._ids)
        self._shown = text
        return new

    def peek(self, token_id: int) -> str:
        text = self._text_with(token_id)
        return "" if text.endswith(BROKEN) else text[len(self._shown) :]

    def flush(self) -> str:
        text = self._tokenizer.decode(self._ids)
        new, self._shown = text[len(self._shown) :], text
        return new

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._skipped and self._tokenizer.token(token_id) is not None

    def _text_with(self, token_id: int) -> str:
        return self._tokenizer.decode([*self._ids, token_id])

    def _new(self, text: str, token_id: int) -> str:
        """Return the new part of the window's text, without a space between two added tokens
        unless spaces are on."""
        added = self._tokenizer.added_tokens
        if not self._glue and len(self._ids) > 1 and {token_id, self._ids[-2]} <= added.keys():
            return added[token_id]
        return text[len(self._shown) :]
