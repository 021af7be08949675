"""Cut a long text so that the tokens of its parts equal the tokens of the whole.

Tokenizing takes memory for each byte processed at once, so parts save memory. They also save time
(`KnownParts`), because texts with one beginning have the same first parts. In general a cut changes
the tokens. Cuts are made before a blank between two ASCII letters, and only for tokenizers for
which this provably changes nothing:

    byte-level      the pattern for words is a known one. No match contains a letter followed by a
                    blank, and none looks beyond it. So matches end at the cut, and others begin.
    sentencepiece   no token contains a character followed by a blank, so merges never cross the
                    cut. The tokenizer prepends to a text the blank itself, or nothing.

No added token may contain such a place or absorb the blank. Composition (NFC) never crosses a
blank.
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
PART_CHARS = 1 << 9  # a turn of a chat tokenizes up to twice as many known characters again


class Cuts:
    """Cuts texts of one tokenizer.

    drops_blank: whether parts begin after the blank, because the tokenizer prepends one.
    """

    def __init__(self, drops_blank: bool) -> None:
        self._drops_blank = drops_blank

    def parts(self, text: str) -> list[str]:
        """Return the text in parts of about PART_CHARS characters; longer where no cut exists."""
        found, start = [], 0
        while len(text) - start > 2 * PART_CHARS:
            place = CUT.search(text, start + PART_CHARS)
            if place is None:
                break
            found.append(text[start : place.end()])
            start = place.end() + self._drops_blank
        return [*found, text[start:]]


def read_cuts(backend: "tokenizers.Tokenizer") -> Cuts | None:
    """Return the cuts of this tokenizer; None unless cuts provably keep its tokens."""
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
    """Return whether all patterns are known, and one of them splits at blanks."""
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
        # A blank between a word and an added token is not a word's prefix.
        is_apart = not any(re.search("^[A-Za-z]|[A-Za-z]$", text) for text in added)
        return Cuts(True) if is_apart else None
    if normalizers == [spaces] and not words:
        return Cuts(False)
    is_metaspace = [(part["type"], part.get("replacement")) for part in words] == [
        ("Metaspace", SPACE_MARK)
    ]
    return Cuts(False) if is_metaspace and not normalizers else None


def _joins_words(backend: "tokenizers.Tokenizer") -> bool:
    """Return whether a token contains a blank after another character.

    Also return True if the blank is no token, because it may then merge with the text before it."""
    joined = re.compile(f"[^{SPACE_MARK}]{SPACE_MARK}").search
    if backend.model.token_to_id(SPACE_MARK) is None:
        return True
    return any(joined(token) for token in backend.get_vocab(with_added_tokens=False))


def _only_composes(normalizers: list[dict[str, Any]]) -> bool:
    return all(part["type"] == "NFC" for part in normalizers)


def _spoils(token: Any) -> bool:
    """Return whether an added token may contain a cut, or absorb the blank at a cut."""
    text: str = token.content
    ends = token.rstrip and re.search("[A-Za-z]$", text)
    begins = token.lstrip and re.match("[A-Za-z]", text)
    return bool(re.search(f"[A-Za-z][ {SPACE_MARK}]|^[ {SPACE_MARK}]", text) or ends or begins)
