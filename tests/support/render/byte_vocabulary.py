"""A vocabulary of bytes, some words and a format's marks, as llguidance sees it."""

import random
import re
from collections.abc import Iterable

import llguidance
import llguidance.numpy
import numpy as np

from quire.render.answers.format import AnswerFormat

WORDS = (
    '{"', '": ', '"name', '": "', '"}', "}}", ', "', '", "arg', "arguments", "\n{", "}\n", ">\n",
    "\n<", "</", "<tool", "_call>", "parameter", "=", "json\n", "```", "to=", " [{", "}]", "ab",
)  # fmt: skip
END = "<|end of answer|>"
_MARK = re.compile(r"<[^<>\s=]+>|\[/?[A-Z_]+\]")


class Vocabulary:
    """Single bytes, then words, then the added tokens; the last token ends an answer."""

    def __init__(self, added: Iterable[str], words: Iterable[str] = WORDS) -> None:
        self.tokens = [bytes([value]) for value in range(256)]
        self.tokens += [word.encode() for word in dict.fromkeys(words)]
        names = dict.fromkeys((*added, END))
        self.added = {text: len(self.tokens) + i for i, text in enumerate(names)}
        self.tokens += [b"\xff" + text.encode() for text in self.added]
        self.end = self.eos_token_id = self.added[END]
        self.bos_token_id = None
        self.special_token_ids = list(self.added.values())
        likely = (text.strip() for text in self.tokens)
        # Tokens that are likely to end a part of an answer.
        self.endings = {i for i, text in enumerate(likely) if text and text[:1] in b'"}]</'}
        self.endings |= {*self.special_token_ids}
        self._matchers: dict[str, llguidance.LLMatcher] = {}
        self._words: dict[int, list[int]] = {}  # by their first byte
        for i in range(256, self.end):
            if i not in self.special_token_ids:
                self._words.setdefault(self.tokens[i][0], []).append(i)
        wrapper = llguidance.TokenizerWrapper(self)
        self.tokenizer = llguidance.LLTokenizer(wrapper, slices=[])

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the longest tokens of a text, which llguidance uses as its canonical tokens."""
        return self._split(text.encode() if isinstance(text, str) else text, None)

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Return a matcher at the beginning of a grammar; each grammar is compiled once."""
        if grammar not in self._matchers:
            matcher = llguidance.LLMatcher(self.tokenizer, grammar, log_level=0)
            assert not matcher.is_error(), matcher.get_error()
            self._matchers[grammar] = matcher
        return self._matchers[grammar].deep_copy()

    def allowed(self, matcher: llguidance.LLMatcher) -> list[int]:
        bits = np.unpackbits(self._mask(matcher).view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: len(self.tokens)]).tolist()

    def allows(self, matcher: llguidance.LLMatcher, token: int) -> bool:
        return bool(int(self._mask(matcher)[token // 32]) >> token % 32 & 1)

    def _mask(self, matcher: llguidance.LLMatcher) -> np.ndarray:
        """Return the allowed tokens as bits of 32-bit words."""
        mask = llguidance.numpy.allocate_token_bitmask(1, len(self.tokens))
        llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
        assert not matcher.is_error(), matcher.get_error()
        return mask[0]

    def text(self, token_ids: list[int]) -> str:
        texts = {i: text.encode() for text, i in self.added.items()}
        whole = b"".join(texts.get(i, self.tokens[i]) for i in token_ids)
        return whole.decode("utf-8", "replace")

    def split(self, text: str, chance: random.Random | None = None) -> list[int]:
        """Split a text into its longest or random tokens; never split an added token."""
        names = sorted(self.added, key=len, reverse=True)
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        found: list[int] = []
        for part in parts:
            is_added = part in self.added
            found += [self.added[part]] if is_added else self._split(part.encode(), chance)
        return found

    def _split(self, rest: bytes, chance: random.Random | None) -> list[int]:
        found, at = [], 0
        while at < len(rest):
            words = self._words.get(rest[at], ())
            fits = [i for i in words if rest.startswith(self.tokens[i], at)] + [rest[at]]
            token = chance.choice(fits) if chance else max(fits, key=self._length)
            found.append(token)
            at += len(self.tokens[token])
        return found

    def _length(self, token: int) -> int:
        return len(self.tokens[token])


def accepts(vocabulary: Vocabulary, grammar: str, token_ids: list[int]) -> str:
    """Return an empty text if the grammar accepts the tokens and may end; otherwise, the reason."""
    matcher = vocabulary.matcher(grammar)
    for number, token_id in enumerate(token_ids):
        if not vocabulary.allows(matcher, token_id):
            done = vocabulary.text(token_ids[:number])
            return f"after {done!r}: {vocabulary.text([token_id])!r} is refused"
        assert matcher.consume_token(token_id), matcher.get_error()
    return "" if matcher.is_accepting() else "it cannot end"


def marks_of(form: AnswerFormat) -> list[str]:
    """Return the texts of a format that models have as added tokens."""
    return sorted({mark for text in form.marks() for mark in _MARK.findall(text)})


def closings(form: AnswerFormat) -> tuple[str, ...]:
    """Return words that let a random walk close a format's marks if these are not tokens."""
    texts = [text.rstrip() for text in form.marks()]
    return WORDS + tuple(text for text in texts if len(text) > 1)
