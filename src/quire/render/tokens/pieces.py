"""Tables of the text that each token adds, and a stream of tokens that looks its text up there.

`piece_tables.py` chooses the table of a tokenizer.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BROKEN = "\ufffd"
CONTEXT = 8  # last tokens of the prompt to consider; an unfinished character has at most 3 bytes

SPACE_MARK = "\u2581"
TokenText = Callable[[int], str | None]


def byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's map from bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


class PieceTable(dict[int, "str | bytes"]):
    """Maps a token id to its text, or to bytes if these are not whole characters. Filled lazily."""

    def __init__(self, make: Callable[[int], "str | bytes"]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> "str | bytes":
        piece = self._make(token_id)
        self[token_id] = piece
        return piece


@dataclass(frozen=True)
class Pieces:
    """A table of pieces, and the rules for joining them.

    byte_level: invalid bytes give one U+FFFD per sequence if True, one per byte if False.
    strip: number of leading spaces to drop from the whole text.
    first: returns the text of the first token if the table's text does not apply (Metaspace).
    """

    table: PieceTable
    byte_level: bool
    strip: int = 0
    first: Callable[[int], str] | None = None


def byte_level(token: TokenText) -> Pieces:
    """Return the table of a byte-level tokenizer."""
    byte_of = byte_of_char()

    def make(token_id: int) -> str | bytes:
        text = token(token_id) or ""
        values = [byte_of.get(char) for char in text]
        if None in values:
            return text  # an added token, which stands for its own text
        data = bytes(value for value in values if value is not None)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    return Pieces(PieceTable(make), byte_level=True)


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
