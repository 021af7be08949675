"""Tool calls in text that arrives in pieces: text streams on, calls come out whole.

Invariant: where the pieces are cut does not matter, and calls and text are those that
`parse_tool_calls` finds in the whole; only white space at the very beginning may stay. Held back
are what may begin an opening tag, the white space before it, and what may be a call. Every
character is looked at a few times at most, whatever the model writes.
"""

import json
import re

from quire.render.tools import CLOSE, OPEN, ToolCall, parse_tool_calls

_OUTSIDE = re.compile(r'[^"{}\[\]<\\]*')  # characters that change nothing outside of strings
_INSIDE = re.compile(r'[^"\\]*')  # the same inside

Piece = str | ToolCall


def parse_answer(text: str) -> tuple[str, list[ToolCall]]:
    """`parse_tool_calls` of any text of a model: calls that can be sent as UTF-8."""
    try:
        content, calls = parse_tool_calls(text)
    except RecursionError:  # arguments that can be read, but are too deep to be written again
        return text, []
    return content, [_sendable(call) for call in calls]


class ToolCallStream:
    """Text goes in with `push`; what is certain comes out, in order."""

    def __init__(self) -> None:
        self._tag = ""  # perhaps the beginning of an opening tag
        self._space: list[str] = []  # white space that is dropped if a call or the end follows
        self._block: _Block | None = None
        self._num_calls = 0
        self._has_text = False
        self._out: list[Piece] = []

    def push(self, text: str) -> list[Piece]:
        self._take(text)
        return self._taken()

    def flush(self) -> list[Piece]:
        """Return the rest, when nothing follows: the last call may lack its closing tag."""
        while self._block is not None:
            self._take(self._end_block(self._block))
        self._emit(self._tag)
        self._tag = ""
        if not self._num_calls and self._space:
            self._out.append("".join(self._space))
            self._space = []
        return self._taken()

    def _take(self, text: str) -> None:
        while text:
            if self._block is None:
                text = self._take_text(text)
                continue
            behind = self._block.push(text)
            text = "" if behind is None else self._end_block(self._block) + behind

    def _take_text(self, text: str) -> str:
        """Take text; return what is left for a block."""
        text = self._tag + text
        at = text.find(OPEN)
        if at >= 0:
            self._tag = ""
            self._emit(text[:at])
            self._block = _Block()
            return text[at + len(OPEN) :]
        at = _beginning_of_tag(text)
        self._emit(text[:at])
        self._tag = text[at:]
        return ""

    def _end_block(self, block: "_Block") -> str:
        """End the block: it is a call, or its opening tag is text and what follows is to be read
        again."""
        self._block = None
        inside = block.text
        if block.is_complete:
            content, calls = parse_answer(OPEN + inside)
            if len(calls) == 1 and not content:
                self._num_calls += 1
                self._out.append(calls[0])
                return ""
        self._emit(OPEN)
        return inside

    def _emit(self, text: str) -> None:
        """White space waits for what follows it."""
        solid = text.rstrip()
        if solid:
            new = "".join(self._space) + solid
            self._out.append(new.lstrip() if self._num_calls and not self._has_text else new)
            self._space = []
            self._has_text = True
        if len(solid) < len(text):
            self._space.append(text[len(solid) :])

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


class _Block:
    """What stands behind an opening tag: space, an object, space, and the closing tag.

    Only its outline is read here; whether the object is a call is decided when it is whole.
    """

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._object_begun = False
        self._tail = ""  # as much as there is of the closing tag
        self._broken = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def is_complete(self) -> bool:
        """Whether it can be a call if nothing follows."""
        return self._object_ended and self._tail in ("", CLOSE) and not self._broken

    @property
    def _object_ended(self) -> bool:
        return self._object_begun and self._depth == 0

    def push(self, text: str) -> str | None:
        """Return what is behind the block if it ends in this text, well or badly; None if it goes
        on."""
        at, end = 0, len(text)
        while at < end and not self._broken and self._tail != CLOSE:
            at = self._scan(text, at)
        self._pieces.append(text[:at])
        return text[at:] if self._broken or self._tail == CLOSE else None

    def _scan(self, text: str, at: int) -> int:
        """Go one step on; a character that cannot stand here is left where it is."""
        if self._in_string:
            return self._scan_string(text, at)
        if self._object_ended:
            return self._scan_tail(text, at)
        if not self._object_begun:
            self._object_begun = text[at] == "{"
            self._depth = int(self._object_begun)
            self._broken = not (self._object_begun or text[at].isspace())
            return at if self._broken else at + 1
        return self._scan_object(text, at)

    def _scan_object(self, text: str, at: int) -> int:
        at = _end_of(_OUTSIDE, text, at)
        char = text[at : at + 1]
        if char == '"':
            self._in_string = True
        elif char in ("{", "["):
            self._depth += 1
        elif char in ("}", "]"):
            self._depth -= 1
        elif char:
            self._broken = True
            return at
        return at + 1

    def _scan_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _end_of(_INSIDE, text, at)
        char = text[at : at + 1]
        self._escaped = char == "\\"
        self._in_string = char != '"'
        return at + 1

    def _scan_tail(self, text: str, at: int) -> int:
        char = text[at]
        if not self._tail and char.isspace():
            return at + 1
        if not CLOSE.startswith(self._tail + char):
            self._broken = True
            return at
        self._tail += char
        return at + 1


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # both patterns match nothing, too
    return found.end()


def _beginning_of_tag(text: str) -> int:
    """Return where the end of the text begins that may be the beginning of an opening tag."""
    at = text.find(OPEN[0], max(0, len(text) - len(OPEN) + 1))
    while at >= 0 and not OPEN.startswith(text[at:]):
        at = text.find(OPEN[0], at + 1)
    return at if at >= 0 else len(text)


def _sendable(call: ToolCall) -> ToolCall:
    r"""JSON can name halves of surrogate pairs (\ud800), which no text in UTF-8 can hold."""
    try:
        (call.name + call.arguments).encode()
        return call
    except UnicodeEncodeError:
        name = call.name.encode("utf-8", "replace").decode()
        return ToolCall(name, json.dumps(json.loads(call.arguments)))
