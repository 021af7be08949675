"""What each token adds to a text, as tables: the way to detokenise without decoding again.

A tokenizer's decoder is read from its JSON. For the two families that matter the text of a token
does not depend on its neighbours, apart from the first token and from characters that are spread
over several tokens:

    byte-level      every token is some bytes; all bytes together are UTF-8 (GPT-2, Llama 3, Qwen)
    sentencepiece   a token is text with U+2581 for a space, or one byte `<0xE4>` (Llama 2, Gemma)

Any other decoder has no table (`read_pieces` gives None) and is decoded in a sliding window.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SPACE_MARK = "\u2581"
TokenText = Callable[[int], str | None]


def byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's map from bytes to printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


class PieceTable(dict[int, "str | bytes"]):
    """Token id -> text, or the bytes of a token that is not whole characters. Filled on use."""

    def __init__(self, make: Callable[[int], "str | bytes"]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token_id: int) -> "str | bytes":
        piece = self._make(token_id)
        self[token_id] = piece
        return piece


@dataclass(frozen=True)
class Pieces:
    """A table and how its pieces are joined.

    byte_level: broken bytes give one U+FFFD per broken sequence; otherwise one per byte.
    strip: how many leading spaces of the whole text are dropped.
    first: the text of a token that begins the whole text, where that differs (Metaspace).
    """

    table: PieceTable
    byte_level: bool
    strip: int = 0
    first: Callable[[int], str] | None = None


def read_pieces(decoder: Any, token: TokenText) -> Pieces | None:
    """Return the table for a decoder as tokenizer.json writes it; None if its tokens need
    context."""
    if not isinstance(decoder, dict):
        return None
    kind = decoder.get("type")
    parts = decoder.get("decoders", []) if kind == "Sequence" else [decoder]
    if kind == "Sequence" and len(parts) == 1:
        kind = parts[0].get("type")
    if kind == "ByteLevel":
        return _byte_level(token)
    if kind == "Metaspace":
        return _metaspace(parts[0], token)
    return _sentencepiece(parts, token) if kind == "Sequence" else None


def _byte_level(token: TokenText) -> Pieces:
    byte_of = byte_of_char()

    def make(token_id: int) -> str | bytes:
        text = token(token_id) or ""
        values = [byte_of.get(char) for char in text]
        if None in values:
            return text  # an added token, written as itself
        data = bytes(value for value in values if value is not None)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    return Pieces(PieceTable(make), byte_level=True)


def _metaspace(part: dict[str, Any], token: TokenText) -> Pieces:
    mark = part.get("replacement", SPACE_MARK)

    def make(token_id: int) -> str | bytes:
        return (token(token_id) or "").replace(mark, " ")

    def first(token_id: int) -> str:
        return (token(token_id) or "").replace(mark, "")

    strips = part.get("prepend_scheme", "always") != "never"
    return Pieces(PieceTable(make), byte_level=False, first=first if strips else None)


def _sentencepiece(parts: list[dict[str, Any]], token: TokenText) -> Pieces | None:
    """Replace..., ByteFallback, Fuse, Strip: in this order, each but Fuse optional."""
    kinds = [part.get("type") for part in parts]
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    if "Fuse" not in kinds or any(kind not in order for kind in kinds):
        return None
    places = [order.index(str(kind)) for kind in kinds]
    if places != sorted(places) or any(kinds.count(kind) > 1 for kind in order[1:]):
        return None
    swaps = [part for part in parts if part.get("type") == "Replace"]
    replaced = [(part["pattern"].get("String"), str(part["content"])) for part in swaps]
    strip: dict[str, Any] = parts[-1] if kinds[-1] == "Strip" else {"content": " "}
    if any(pattern is None for pattern, _ in replaced):
        return None
    if strip["content"] != " " or strip.get("stop"):
        return None
    has_bytes = "ByteFallback" in kinds

    def make(token_id: int) -> str | bytes:
        text = token(token_id) or ""
        for pattern, content in replaced:
            text = text.replace(pattern, content)
        byte = _fallback_byte(text) if has_bytes else None
        return text if byte is None else byte

    return Pieces(PieceTable(make), byte_level=False, strip=int(strip.get("start", 0)))


def _fallback_byte(text: str) -> bytes | None:
    """`<0xE4>` is the byte E4; an ASCII byte is a character by itself."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        return bytes([int(text[3:5], 16)])
    except ValueError:
        return None
