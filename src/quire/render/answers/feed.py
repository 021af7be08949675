"""Text that arrives in pieces, read by generators that pause where it ends.

A reader consumes what there is and leaves no more unread than a mark of which it saw the beginning;
so a piece is copied once. What is consumed while `hold` is on can be given back: what cannot be
read in one way is read again in another.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACE = re.compile(r"\s*")


class Feed:
    """sink: gets every text that is consumed, in order."""

    def __init__(self) -> None:
        self.ended = False
        self.sink: Callable[[str], None] | None = None
        self._text = ""
        self._at = 0
        self._before = 0  # characters that were in front of _text
        self._held: list[str] | None = None
        self._held_from: int | None = None  # where the held text begins, while it is all in _text

    @property
    def position(self) -> int:
        """Return how many characters are consumed."""
        return self._before + self._at

    def give(self, text: str) -> None:
        """Add a piece; the reader must be resumed before the next one."""
        if self._at:
            if self._held_from is not None and self._held is not None:
                self._held.append(self._text[self._held_from : self._at])
                self._held_from = None
            self._text = self._text[self._at :]
            self._before += self._at
            self._at = 0
        self._text = self._text + text if self._text else text

    def more(self) -> Reading[bool]:
        """Wait until there is more than there was; False if nothing will come."""
        size = len(self._text) - self._at
        while len(self._text) - self._at == size:
            if self.ended:
                return False
            yield
        return True

    def advance(self, count: int) -> str:
        """Consume so many characters, which must be there."""
        text = self._text[self._at : self._at + count]
        if self._held is not None and self._held_from is None:
            self._held.append(text)
        self._at += count
        if self.sink is not None and text:
            self.sink(text)
        return text

    def hold(self) -> None:
        """Keep what is consumed from here on."""
        self._held = []
        self._held_from = self._at

    def release(self) -> None:
        """Forget what was held: it was read well."""
        self._held = None
        self._held_from = None

    def rewind(self) -> None:
        """Give back what was held, and hold no longer."""
        if self._held_from is not None:
            self._at = self._held_from
        elif self._held is not None:
            held = "".join(self._held)
            self._text = held + self._text[self._at :]
            self._before += self._at - len(held)
            self._at = 0
        self.release()

    def peek(self) -> Reading[str]:
        """Return the next character, which stays; an empty text at the end."""
        if self._at == len(self._text) and not (yield from self.more()):
            return ""
        return self._text[self._at]

    def run(self, pattern: re.Pattern[str], limit: int | None = None) -> Reading[str]:
        """Consume characters as long as the pattern, which is some class with a star, has them.

        limit: at most so many. Returns them, unless somebody else gets them by `sink`.
        """
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
        """Consume this text, if it is what follows."""
        while not self._text.startswith(word, self._at):
            rest = self._text[self._at : self._at + len(word)]
            if not word.startswith(rest) or not (yield from self.more()):
                return False
        self.advance(len(word))
        return True

    def spaced(self, text: str) -> Reading[bool]:
        """Consume the words of this text, with any white space before each."""
        for word in text.split():
            yield from self.space()
            if not (yield from self.literal(word)):
                return False
        return True

    def until(self, marks: "Marks") -> Reading[str | None]:
        """Consume the text before the next mark, and hand it to `sink`; then the mark, which it
        returns. None: there is none until the end."""
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
    """Texts that are looked for; where several begin, the longest counts."""

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = sorted(set(words), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.words)) or r"(?!)")
        self._longest = max(map(len, self.words), default=0)
        self._firsts = {word[0] for word in self.words}

    def begins_at(self, text: str, start: int) -> int:
        """Return where the end of a text begins that goes on as a mark, or as a longer one."""
        for at in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[at] in self._firsts:
                rest = text[at:]
                if any(len(word) > len(rest) and word.startswith(rest) for word in self.words):
                    return at
        return len(text)
