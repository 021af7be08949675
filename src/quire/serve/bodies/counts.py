"""Limits of a large JSON text, counted in its bytes before it is decoded."""

import numpy as np
import numpy.typing as npt

from quire.serve.errors import ApiError

MAX_VALUES = 3 << 18
MAX_CONTAINERS = 1 << 15
MAX_TEXTS = 1 << 17  # texts, names of fields included
MAX_EXPONENTS = 1 << 16  # numbers that are slow to read; true and false count as such
MAX_WIDE_BYTES = 8 << 20  # bytes of texts with a character above U+FFFF
PIECE_BYTES = 1 << 18

QUOTE, COMMA, BRACE, EXPONENT = b'",{e'
LOWER = 0x20  # bit that turns [ into {, and E into e
BACKSLASH = ord("\\")
WIDE = 0xF0  # the first byte of a character above U+FFFF
WIDE_TEXTS = "bytes in texts with characters above U+FFFF such as emoji"


def check_counts(data: bytes | bytearray, name: str) -> None:
    """Raise ApiError if the data has too many values, containers, texts or slow numbers."""
    num_values, num_containers, num_quotes, num_exponents = 1, 0, 0, 0
    rest, is_text, wide = b"", False, _WideTexts()
    for start in range(0, len(data), PIECE_BYTES):
        piece = (rest + data[start : start + PIECE_BYTES]).replace(rb"\\", b"  ")
        rest = b"\\" if piece.endswith(b"\\") else b""  # the escaped character is in the next piece
        chars = np.frombuffer(piece.replace(rb"\"", b"  "), np.uint8)
        quotes = chars == QUOTE
        in_text = np.logical_xor.accumulate(quotes) ^ is_text
        is_text = bool(in_text[-1])
        num_quotes += int(np.count_nonzero(quotes))
        structure = np.where(in_text, 0, chars | LOWER)
        num_here = int(np.count_nonzero(structure == BRACE))
        num_containers += num_here
        num_values += num_here + int(np.count_nonzero(structure == COMMA))
        num_exponents += int(np.count_nonzero(structure == EXPONENT))
        wide.take(chars, quotes)
        for number, limit, kind in (
            (num_values, MAX_VALUES, "values"),
            (num_containers, MAX_CONTAINERS, "lists and objects"),
            (num_quotes // 2, MAX_TEXTS, "texts and names"),
            (num_exponents, MAX_EXPONENTS, "booleans and numbers with exponents"),
            (wide.num_bytes, MAX_WIDE_BYTES, WIDE_TEXTS),
        ):
            if number > limit:
                raise _too_many(name, limit, kind)


class _WideTexts:
    """Counter of the bytes of texts with a character above U+FFFF. Such a character makes Python
    use four bytes for each character of the text."""

    def __init__(self) -> None:
        self._ended = 0  # bytes of texts that have ended
        self._open, self._is_open_wide = 0, False  # bytes since the last quote

    @property
    def num_bytes(self) -> int:
        return self._ended + (self._open if self._is_open_wide else 0)

    def take(self, chars: npt.NDArray[np.uint8], quotes: npt.NDArray[np.bool_]) -> None:
        """Count the next piece. chars: its bytes `[num_bytes]`; quotes: mask of its quotes."""
        is_wide = chars >= WIDE
        escapes = (chars[:-2] == BACKSLASH) & (chars[1:-1] == ord("u"))
        is_wide[:-2] |= escapes & (chars[2:] | LOWER == ord("d"))  # half of a surrogate pair
        edges = np.flatnonzero(quotes)
        sizes = np.diff(edges, prepend=-1, append=len(chars) - 1)
        parts = np.unique(np.searchsorted(edges, np.flatnonzero(is_wide)))
        wide = np.zeros(len(sizes), bool)
        wide[parts] = True
        sizes[0] += self._open
        wide[0] |= self._is_open_wide
        self._ended += int(sizes[:-1][wide[:-1]].sum())
        self._open, self._is_open_wide = int(sizes[-1]), bool(wide[-1])


def _too_many(name: str, limit: int, kind: str) -> ApiError:
    text = f"{name} has more than {limit} {kind}; send less, or several requests."
    return ApiError(413, text, code="too_many_values")
