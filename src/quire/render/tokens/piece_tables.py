"""Choice of a tokenizer's table of pieces, from the decoder in its tokenizer.json.

In two families the text of a token does not depend on its neighbours. The exceptions are the first
token and characters that span several tokens:

    byte-level      each token is a string of bytes; the joined bytes are UTF-8 (GPT-2, Llama 3)
    sentencepiece   a token is text with U+2581 for a space, or one byte `<0xE4>` (Llama 2, Gemma)

For any other decoder `read_pieces` returns None, and a sliding window is decoded instead
(`token_stream.py`, which also says what holds for every stream).
"""

from typing import Any

from quire.render.tokens.pieces import SPACE_MARK, Pieces, PieceTable, TokenText, byte_level


def read_pieces(decoder: Any, token: TokenText) -> Pieces | None:
    """Return the table for a decoder in tokenizer.json's form; None if tokens need context."""
    if not isinstance(decoder, dict):
        return None
    kind = decoder.get("type")
    parts = decoder.get("decoders", []) if kind == "Sequence" else [decoder]
    if kind == "Sequence" and len(parts) == 1:
        kind = parts[0].get("type")
    if kind == "ByteLevel":
        return byte_level(token)
    if kind == "Metaspace":
        return _metaspace(parts[0], token)
    return _sentencepiece(parts, token) if kind == "Sequence" else None


def _metaspace(part: dict[str, Any], token: TokenText) -> Pieces:
    mark = part.get("replacement", SPACE_MARK)

    def make(token_id: int) -> str | bytes:
        return (token(token_id) or "").replace(mark, " ")

    def first(token_id: int) -> str:
        return (token(token_id) or "").replace(mark, "")

    strips = part.get("prepend_scheme", "always") != "never"
    return Pieces(PieceTable(make), byte_level=False, first=first if strips else None)


def _sentencepiece(parts: list[dict[str, Any]], token: TokenText) -> Pieces | None:
    """Return the table for Replace..., ByteFallback, Fuse, Strip: in this order, Fuse required."""
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
    """Return the byte of a token such as `<0xE4>`; None for any other text."""
    if len(text) != 6 or not text.startswith("<0x") or not text.endswith(">"):
        return None
    try:
        return bytes([int(text[3:5], 16)])
    except ValueError:
        return None
