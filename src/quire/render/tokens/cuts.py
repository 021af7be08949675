"""Where a long text may be cut so that the tokens of its parts are those of the whole.

Tokenising takes memory for each byte that is worked on at once; in parts it takes that of a part.
A cut is not exact in general. It is between an ASCII letter and a blank that another one follows,
for tokenizers of which that can be shown:

    byte-level      the rule for words is a known one. No match of it holds a letter with a blank
                    behind it, or looks beyond, so matches end at the cut, and others begin there.
    sentencepiece   no token holds a character with a blank behind it, so merges never cross the
                    cut. What the tokenizer puts before a text is the blank itself, or nothing
                    before one.

Added tokens must not hold such a place, or take in the blank. Composition (NFC) never reaches over
a blank.
"""

import re
from typing import TYPE_CHECKING, Any

from quire.render.tokens.pieces import SPACE_MARK
from quire.render.tokens.pre_tokenizers import GPT2, LLAMA3, PLAIN, QWEN2, TEKKEN
from quire.render.tokens.text_bound import flat_parts

if TYPE_CHECKING:
    import tokenizers

CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])")
KNOWN_RULES = (GPT2, LLAMA3, QWEN2, TEKKEN, PLAIN)
DIGITS = r"\p{N}"
PART_CHARS = 1 << 16


class Cuts:
    """drops_blank: whether a part begins behind the blank, which the tokenizer puts there again."""

    def __init__(self, drops_blank: bool) -> None:
        self._drops_blank = drops_blank

    def parts(self, text: str) -> list[str]:
        """Return the text in parts of about PART_CHARS characters, or more where it has no place to
        be cut at."""
        found, start = [], 0
        while len(text) - start > 2 * PART_CHARS:
            place = CUT.search(text, start + PART_CHARS)
            if place is None:
                break
            found.append(text[start : place.end()])
            start = place.end() + self._drops_blank
        return [*found, text[start:]]


def read_cuts(backend: "tokenizers.Tokenizer") -> Cuts | None:
    """Return where this tokenizer's texts may be cut; None if no place can be shown to be right."""
    from tokenizers import models

    model = backend.model
    if not isinstance(model, models.BPE) or model.dropout:
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    added = list(backend.get_added_tokens_decoder().values())
    if any(map(_spoils, added)):
        return None
    normalizers = flat_parts(backend.normalizer, "normalizers")
    words = flat_parts(backend.pre_tokenizer, "pretokenizers")
    if words and words[-1]["type"] == "ByteLevel":
        return Cuts(False) if _only_composes(normalizers) and _cuts_words(words) else None
    if _joins_words(backend):
        return None
    return _sentence_piece(normalizers, words, [token.content for token in added])


def _cuts_words(words: list[dict[str, Any]]) -> bool:
    """Return whether all rules are known ones, and one of them cuts at blanks."""
    *rules, level = words
    patterns = [_pattern(rule) for rule in rules]
    is_known = all(pattern in (*KNOWN_RULES, DIGITS) for pattern in patterns)
    return is_known and (level.get("use_regex", True) or any(p in KNOWN_RULES for p in patterns))


def _pattern(rule: dict[str, Any]) -> str | None:
    if rule["type"] == "Digits":
        return DIGITS
    if rule["type"] != "Split" or rule["behavior"] != "Isolated" or rule["invert"]:
        return None
    pattern: str | None = rule["pattern"].get("Regex")
    return pattern


def _sentence_piece(
    normalizers: list[dict[str, Any]], words: list[dict[str, Any]], added: list[str]
) -> Cuts | None:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    before = {"type": "Prepend", "prepend": SPACE_MARK}
    if normalizers == [before, spaces] and not words:
        # A blank between a word and an added token is not one before a word.
        is_apart = not any(re.search("^[A-Za-z]|[A-Za-z]$", text) for text in added)
        return Cuts(True) if is_apart else None
    if normalizers == [spaces] and not words:
        return Cuts(False)
    is_metaspace = [(part["type"], part.get("replacement")) for part in words] == [
        ("Metaspace", SPACE_MARK)
    ]
    return Cuts(False) if is_metaspace and not normalizers else None


def _joins_words(backend: "tokenizers.Tokenizer") -> bool:
    """Return whether a token holds a blank behind another character; a blank that is no token may
    be taken together with what is before it."""
    joined = re.compile(f"[^{SPACE_MARK}]{SPACE_MARK}").search
    if backend.model.token_to_id(SPACE_MARK) is None:
        return True
    return any(joined(token) for token in backend.get_vocab(with_added_tokens=False))


def _only_composes(normalizers: list[dict[str, Any]]) -> bool:
    return all(part["type"] == "NFC" for part in normalizers)


def _spoils(token: Any) -> bool:
    """Return whether an added token may hold a cut, or take in the blank at one."""
    text: str = token.content
    ends = token.rstrip and re.search("[A-Za-z]$", text)
    begins = token.lstrip and re.match("[A-Za-z]", text)
    return bool(re.search(f"[A-Za-z][ {SPACE_MARK}]|^[ {SPACE_MARK}]", text) or ends or begins)
