"""A buffer for text that arrives in pieces, read by generators that pause at its end.

Readers consume all available text except the start of a possible mark, so each piece is copied
once. Text consumed while `hold` is on can be rewound and read again with another syntax.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACE = re.compile(r"\s*")


class Feed:
    """Buffer of unread text. Consumed text also goes to `sink`, in order, if one is set."""

    def __init__(self) -> None:
        self.ended = False
        self.sink: Callable[[str], None] | None = None
        self._text = ""
        self._at = 0
        self._before = 0  # characters dropped in front of _text
        self._held: list[str] | None = None
        self._held_from: int | None = None  # start of the held text while _text contains all of it

    @property
    def position(self) -> int:
        """Return the number of characters consumed so far."""
        return self._before + self._at

    def give(self, text: str) -> None:
        """Append a piece. The reader must be resumed before the next piece."""
        if self._at:
            if self._held_from is not None and self._held is not None:
                self._held.append(self._text[self._held_from : self._at])
                self._held_from = None
            self._text = self._text[self._at :]
            self._before += self._at
            self._at = 0
        self._text = self._text + text if self._text else text

    def more(self) -> Reading[bool]:
        """Wait for more text; return False if the text has ended."""
        size = len(self._text) - self._at
        while len(self._text) - self._at == size:
            if self.ended:
                return False
            yield
        return True

    def advance(self, count: int) -> str:
        """Consume and return the next `count` characters, which must be available."""
        text = self._text[self._at : self._at + count]
        if self._held is not None and self._held_from is None:
            self._held.append(text)
        self._at += count
        if self.sink is not None and text:
            self.sink(text)
        return text

    def hold(self) -> None:
        """Keep the text consumed from now on, so that `rewind` can restore it."""
        self._held = []
        self._held_from = self._at

    def release(self) -> None:
        """Drop the held text and stop holding."""
        self._held = None
        self._held_from = None

    def rewind(self) -> None:
        """Make the held text unread again and stop holding."""
        if self._held_from is not None:
            self._at = self._held_from
        elif self._held is not None:
            held = "".join(self._held)
            self._text = held + self._text[self._at :]
            self._before += self._at - len(held)
            self._at = 0
        self.release()

    def peek(self) -> Reading[str]:
        """Return the next character without consuming it; an empty string at the end."""
        if self._at == len(self._text) and not (yield from self.more()):
            return ""
        return self._text[self._at]

    def run(self, pattern: re.Pattern[str], limit: int | None = None) -> Reading[str]:
        """Consume up to `limit` characters that match the pattern, a starred character class.

        Return the consumed text, or an empty string if `sink` received it."""
        pieces: list[str] = []
        size = 0
        while (yield from self.peek()):
            found = pattern.match(self._text, self._at)
            length = 0 if found is None else found.end() - self._at
            if limit is not None:
                length = min(length, limit - size)
            if length == 0:
                break
            size += length
            text = self.advance(length)
            if self.sink is None:
                pieces.append(text)
        return "".join(pieces)

    def space(self) -> Reading[str]:
        return (yield from self.run(_SPACE))

    def literal(self, word: str) -> Reading[bool]:
        """Consume `word` if it follows; return whether it did."""
        while not self._text.startswith(word, self._at):
            rest = self._text[self._at : self._at + len(word)]
            if not word.startswith(rest) or not (yield from self.more()):
                return False
        self.advance(len(word))
        return True

    def spaced(self, text: str) -> Reading[bool]:
        """Consume the words of this text, each after any white space; return whether all came."""
        for word in text.split():
            yield from self.space()
            if not (yield from self.literal(word)):
                return False
        return True

    def until(self, marks: "Marks") -> Reading[str | None]:
        """Pass the text before the next mark to `sink`, then consume and return the mark.

        Return None if the text ends without a mark."""
        while True:
            found = marks.pattern.search(self._text, self._at)
            perhaps = marks.begins_at(self._text, self._at)
            if found is not None and (found.start() < perhaps or self.ended):
                self.advance(found.start() - self._at)
                sink, self.sink = self.sink, None
                self.advance(found.end() - found.start())
                self.sink = sink
                return found.group()
            self.advance(perhaps - self._at)
            if not (yield from self.more()) and found is None:
                self.advance(len(self._text) - self._at)
                return None


class Marks:
    """A set of texts to search for. If several match at one position, the longest one counts."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = sorted(set(words), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.words)) or r"(?!)")
        self._longest = max(map(len, self.words), default=0)
        self._firsts = {word[0] for word in self.words}

    def begins_at(self, text: str, start: int) -> int:
        """Return the start of an unfinished mark at the end of the text, else the text's length."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts:
                rest = text[at:]
                if any(len(word) > len(rest) and word.startswith(rest) for word in self.words):
                    return at
        return len(text)
