"""The interface of streams from tokens to text, and a stream for decoders without a table.

Invariants: the joined results of `push` for a list of tokens, followed by `flush`, equal
`Tokenizer.decode` of the list. `push` never returns part of a character. One exception is an
improvement: if one byte token of a run is invalid, sentencepiece's decode drops the whole run; a
stream keeps the valid characters before it.

A stream may continue a prompt. Then a leading space stays, and a character that the prompt began is
returned whole.
"""

from collections.abc import Sequence
from typing import Protocol

from quire.render.tokens.pieces import BROKEN, CONTEXT
from quire.render.tokens.tokenizer import Tokenizer

WINDOW = 24  # tokens decoded at once if there is no table


class TokenStream(Protocol):
    """Text of a growing list of tokens."""

    def push(self, token_id: int) -> str:
        """Return the text that this token makes certain."""

    def peek(self, token_id: int) -> str:
        """Return the text that this token would add, also if `push` skips it as special."""

    def flush(self) -> str:
        """Return the rest of an unfinished character."""


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
