"""How many tokens a text has at least, known without tokenising it.

Every byte value gets a weight such that the bytes of no token weigh more than 1 together: one over
the length of the longest token that the byte is part of. A text then has at least as many tokens as
its bytes weigh. That is certain only for tokenizers that write down every byte of a text, so it is
asked of tokenizer.json: byte-level ones, and SentencePiece's with a token for each byte. A token
that takes in the blanks beside it (`lstrip`, `rstrip`) may take in any number: blanks weigh nothing
then. Unicode's composed form (NFC) may shorten a text to a third.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.render.tokens.pieces import SPACE_MARK, byte_of_char

if TYPE_CHECKING:
    import tokenizers

PART_CHARS = 1 << 16  # of a text, counted at once
BLANKS = "".join(c for c in map(chr, range(0x3001)) if c.isspace() or c == "\u200b").encode()
COMPOSED_SHRINK = 3
KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


@dataclass(frozen=True)
class TextBound:
    """longest: bytes of the longest token. groups: byte values by the length of the longest token
    that they are part of. composes: whether texts are brought into composed form first.
    """

    longest: int
    groups: tuple[tuple[int, bytes], ...]
    composes: bool

    def at_least(self, text: str) -> int:
        """Return a number of tokens that the text has at least, without those put before and
        behind."""
        if self.composes and not text.isascii():
            num_bytes = sum(map(len, _parts(text)))
            return num_bytes // (COMPOSED_SHRINK * self.longest) if self._all_weigh else 0
        counts = [0] * len(self.groups)
        for part in _parts(text):
            for index, (_, values) in enumerate(self.groups):
                counts[index] += len(part) - len(part.translate(None, values))
        weights = [n / length for n, (length, _) in zip(counts, self.groups, strict=True)]
        return int(sum(weights) * (1 - 1e-9))

    @property
    def _all_weigh(self) -> bool:
        return any(ord(" ") in values for _, values in self.groups)


def _parts(text: str) -> Iterator[bytes]:
    """Yield the bytes of a text, of which there is never a whole copy."""
    for start in range(0, len(text), PART_CHARS):
        yield text[start : start + PART_CHARS].encode("utf-8", "surrogatepass")


def text_bound(backend: "tokenizers.Tokenizer") -> TextBound | None:
    """Return a tokenizer's bound; None if it may drop parts of a text or take any number as one."""
    rules = _Rules(backend)
    if not (rules.is_byte_level or rules.is_sentence_piece):
        return None
    tokens = [rules.bytes_of(token) for token in backend.get_vocab(with_added_tokens=True)]
    tokens.sort(key=len, reverse=True)
    groups, seen = dict[int, bytes](), bytearray()
    if any(t.lstrip or t.rstrip for t in backend.get_added_tokens_decoder().values()):
        seen += BLANKS
    for token in tokens:
        new = bytes(set(token.translate(None, seen)))
        if new:
            groups[len(token)] = groups.get(len(token), b"") + new
            seen += new
    return TextBound(len(tokens[0]), tuple(groups.items()), rules.composes)


class _Rules:
    """What tokenizer.json says about the way of a text to its tokens."""

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        self._model = backend.model
        self._normalizers = flat_parts(backend.normalizer, "normalizers")
        self._cuts = flat_parts(backend.pre_tokenizer, "pretokenizers")
        self._byte_of = byte_of_char()
        self._added = {t.content for t in backend.get_added_tokens_decoder().values()}

    @property
    def composes(self) -> bool:
        return any(part["type"] == "NFC" for part in self._normalizers)

    @cached_property
    def is_byte_level(self) -> bool:
        return (
            self._is_plain
            and any(part["type"] == "ByteLevel" for part in self._cuts)
            and all(part["type"] in ("NFC", "Prepend") for part in self._normalizers)
            and all(self._has(char) for char in self._byte_of)
        )

    @property
    def is_sentence_piece(self) -> bool:
        return (
            self._is_plain
            and bool(self._model.byte_fallback)
            and all(_keeps_spaces(part) for part in self._normalizers)
            and all(self._has(f"<0x{value:02X}>") for value in range(256))
        )

    @cached_property
    def _is_plain(self) -> bool:
        """Merges of characters, cut into words without losing any."""
        from tokenizers import models

        model = self._model
        return (
            isinstance(model, models.BPE)
            and not model.continuing_subword_prefix
            and not model.end_of_word_suffix
            and all(_keeps(part) for part in self._cuts)
        )

    def _has(self, token: str) -> bool:
        return self._model.token_to_id(token) is not None

    def bytes_of(self, token: str) -> bytes:
        """Return as many bytes as the longest text has that may become the token, with all its
        bytes."""
        written = token.encode("utf-8", "surrogatepass")
        if self.is_byte_level:
            meant = bytes(self._byte_of[char] for char in token if char in self._byte_of)
            return (
                meant if len(meant) == len(token) and token not in self._added else written + meant
            )
        if SPACE_MARK in token:  # of a blank, or written as such
            written += b" "
        if len(token) == 6 and token.startswith("<0x"):
            written += bytes.fromhex(token[3:5])
        return written


def flat_parts(part: Any, key: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as a list of simple ones."""
    if part is None:
        return []
    return _flat(json.loads(part.__getstate__()), key)


def _flat(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if state.get("type") != "Sequence":
        return [state]
    return [part for inner in state[key] for part in _flat(inner, key)]


def _keeps(cut: dict[str, Any]) -> bool:
    """Return whether a rule for words drops no character."""
    if cut["type"] in ("Split", "Punctuation"):
        return cut.get("behavior") in KEEPING
    return cut["type"] in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")


def _keeps_spaces(part: dict[str, Any]) -> bool:
    """Return whether a normalizer only writes blanks as U+2581, and puts them before a text."""
    if part["type"] == "Replace":
        return bool(part["pattern"] == {"String": " "} and part["content"] == SPACE_MARK)
    return bool(part["type"] == "Prepend")
