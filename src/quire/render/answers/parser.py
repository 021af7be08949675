"""`AnswerParser`: converts the text of an answer to parts, while the text arrives in pieces.

The joined parts do not depend on where the text is cut. Only marks and white space between parts
are dropped; text that is no valid call becomes content. The parser examines every character a
bounded number of times.
"""

from collections.abc import Collection

from quire.render.answers.calls import CallReader
from quire.render.answers.feed import Feed, Marks, Reading
from quire.render.answers.parts import Part
from quire.render.answers.syntax import (
    CallFormat,
    ReasoningFormat,
    Tool,
    content_marks,
    openers,
    reasoning_marks,
)
from quire.render.answers.writer import Writer


class AnswerParser:
    """Incremental parser of one answer.

    calls: format of the calls; None to read no calls.
    begins_in_reasoning: whether the prompt contains the mark that opens the reasoning.
    only_content: whether a grammar lets nothing follow content, so that marks in it are plain text.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Collection[Tool] = (),
        begins_in_reasoning: bool = False,
        only_content: bool = False,
    ) -> None:
        self._feed = Feed()
        self._writer = Writer(calls.id_chars if calls else 0)
        self._answer = _Answer(self._feed, self._writer, calls, reasoning, tools)
        self._reading = self._answer.read(begins_in_reasoning, only_content)
        next(self._reading)

    @property
    def reasoning_end(self) -> int | None:
        """Return the number of characters up to the end of the reasoning's closing mark.

        Return 0 if the answer has no reasoning, None while reasoning is open or may still begin.
        Reasoning after content or after a call does not count."""
        return self._answer.reasoning_end

    def push(self, text: str) -> list[Part]:
        if text:
            self._feed.give(text)
            next(self._reading)
        return self._writer.taken()

    def flush(self) -> list[Part]:
        """End the answer: close any open call and return the remaining parts."""
        self._feed.ended = True
        for _ in self._reading:
            pass
        return self._writer.taken()


class _Answer:
    """Read one answer as content, and switch to reasoning and calls at their marks."""

    def __init__(
        self,
        feed: Feed,
        writer: Writer,
        calls: CallFormat | None,
        reasoning: ReasoningFormat | None,
        tools: Collection[Tool],
    ) -> None:
        self._feed = feed
        self._writer = writer
        self._reasoning = reasoning
        self._reasoning_end: int | None = None
        self._is_reasoning = False
        self._calls = CallReader(feed, writer, tools)
        self._bare = [one for one in (calls.syntaxes if calls else ()) if one.is_bare]
        self._openers = openers(calls)
        self._marks = Marks(content_marks(calls, reasoning))
        self._close = Marks(reasoning_marks(reasoning) if reasoning is not None else ())

    @property
    def reasoning_end(self) -> int | None:
        if self._is_reasoning:
            return None
        if self._reasoning_end is not None:
            return self._reasoning_end
        return 0 if self._is_settled or self._feed.ended else None

    @property
    def _is_settled(self) -> bool:
        """Whether content or a call has begun."""
        return self._writer.has_content or self._writer.num_calls > 0

    def read(self, begins_in_reasoning: bool, only_content: bool) -> Reading[None]:
        feed, writer = self._feed, self._writer
        if begins_in_reasoning:
            yield from self._read_reasoning()
        while (yield from feed.peek()):
            if self._bare and not writer.has_content:
                yield from self._read_bare()
            marks = self._marks
            if only_content and not (yield from self._is_at_mark()):
                marks = Marks(())
            feed.sink = writer.content
            mark = yield from feed.until(marks)
            feed.sink = None
            if mark is None:
                break
            if mark in self._openers:
                yield from self._read_calls(mark)
            elif self._reasoning is not None and mark == self._reasoning.open:
                yield from self._read_reasoning()
        writer.end()

    def _is_at_mark(self) -> Reading[bool]:
        """Return whether a mark follows, after any white space."""
        self._feed.hold()
        yield from self._feed.space()
        found = False
        for word in self._marks.words:
            found = found or (yield from self._feed.literal(word))
        self._feed.rewind()
        return found

    def _read_reasoning(self) -> Reading[None]:
        assert self._reasoning is not None
        self._is_reasoning = not self._is_settled
        self._writer.begin_reasoning()
        yield from self._feed.space()
        yield from self._feed.literal(self._reasoning.open)  # some models repeat the mark
        self._feed.sink = self._writer.reasoning
        mark = yield from self._feed.until(self._close)
        self._feed.sink = None
        if self._is_reasoning and mark is not None:
            self._reasoning_end, self._is_reasoning = self._feed.position, False

    def _read_bare(self) -> Reading[None]:
        """Read calls without an opening mark, which only the start of an answer may contain."""
        for syntax in self._bare:
            self._feed.hold()
            if not (yield from self._calls.read(syntax, "")):
                self._feed.rewind()
                continue
            self._feed.rewind()
            return

    def _read_calls(self, opener: str) -> Reading[None]:
        for syntax in self._openers[opener]:
            self._feed.hold()
            found = yield from self._calls.read(syntax, opener)
            self._feed.rewind()
            if found:
                return
        if self._reasoning is None or opener not in self._reasoning.silent:
            self._writer.content(opener)
