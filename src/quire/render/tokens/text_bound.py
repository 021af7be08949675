"""A lower bound on the number of a text's tokens, computed without tokenizing it.

Every byte value has a weight: 1 over the length of the longest token that contains the byte. So the
bytes of one token weigh at most 1, and a text has at least as many tokens as its bytes weigh.

This holds only for tokenizers that drop no byte of a text. tokenizer.json shows it for byte-level
ones, and for SentencePiece's with a token for each byte. A token that absorbs neighbouring blanks
(`lstrip`, `rstrip`) may absorb any number, so blanks then weigh nothing. Unicode's composed form
(NFC) may shorten a text to a third.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.render.tokens.pieces import SPACE_MARK, byte_of_char

if TYPE_CHECKING:
    import tokenizers

PART_CHARS = 1 << 16  # characters of a text to count at once
BLANKS = "".join(c for c in map(chr, range(0x3001)) if c.isspace() or c == "\u200b").encode()
COMPOSED_SHRINK = 3
KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


@dataclass(frozen=True)
class TextBound:
    """The weights of one tokenizer's bytes."""

    longest: int  # bytes of the longest token
    groups: tuple[tuple[int, bytes], ...]  # byte values, by the longest token that contains them
    composes: bool  # whether texts are first normalized to the composed form

    def at_least(self, text: str) -> int:
        """Return a lower bound on the text's tokens, without special tokens around it."""
        if self.composes and not text.isascii():
            num_bytes = sum(map(len, _parts(text)))
            return num_bytes // (COMPOSED_SHRINK * self.longest) if self._all_weigh else 0
        counts = [0] * len(self.groups)
        for part in _parts(text):
            for index, (_, values) in enumerate(self.groups):  # the first ones hold most bytes
                rest = part.translate(None, values)
                counts[index] += len(part) - len(rest)
                part = rest
        weights = [n / length for n, (length, _) in zip(counts, self.groups, strict=True)]
        return int(sum(weights) * (1 - 1e-9))

    @property
    def _all_weigh(self) -> bool:
        return any(ord(" ") in values for _, values in self.groups)


def _parts(text: str) -> Iterator[bytes]:
    """Yield the bytes of a text in parts, so that no whole copy exists."""
    for start in range(0, len(text), PART_CHARS):
        yield text[start : start + PART_CHARS].encode("utf-8", "surrogatepass")


def text_bound(backend: "tokenizers.Tokenizer") -> TextBound | None:
    """Return a tokenizer's bound; None if it may drop text or join any amount into one token."""
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
    """The properties of a tokenizer that the bound depends on."""

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
        """Whether the tokenizer is plain BPE over words, and splitting into words drops nothing."""
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
        """Return all bytes that may become the token; at least as many as any such text has."""
        written = token.encode("utf-8", "surrogatepass")
        if self.is_byte_level:
            meant = bytes(self._byte_of[char] for char in token if char in self._byte_of)
            return (
                meant if len(meant) == len(token) and token not in self._added else written + meant
            )
        if SPACE_MARK in token:  # stands for a blank, or for itself
            written += b" "
        if len(token) == 6 and token.startswith("<0x"):
            written += bytes.fromhex(token[3:5])
        return written


def flat_parts(part: Any, key: str) -> list[dict[str, Any]]:
    """Return a normalizer or pre-tokenizer as a flat list of its simple parts."""
    if part is None:
        return []
    return _flat(json.loads(part.__getstate__()), key)


def _flat(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    if state.get("type") != "Sequence":
        return [state]
    return [part for inner in state[key] for part in _flat(inner, key)]


def _keeps(cut: dict[str, Any]) -> bool:
    """Return whether a rule that splits words drops no character."""
    if cut["type"] in ("Split", "Punctuation"):
        return cut.get("behavior") in KEEPING
    return cut["type"] in ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts")


def _keeps_spaces(part: dict[str, Any]) -> bool:
    """Return whether a normalizer only replaces blanks by U+2581 or prepends text."""
    if part["type"] == "Replace":
        return bool(part["pattern"] == {"String": " "} and part["content"] == SPACE_MARK)
    return bool(part["type"] == "Prepend")
