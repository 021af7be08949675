"""Incremental parser for tool calls: it follows a `CallSyntax` while the text arrives in pieces.

The reader emits a call only once the call is certain. By then the name is complete and the text the
syntax demands follows, up to the start of the arguments. An emitted call cannot be taken back. If
its arguments turn out not to be JSON, the text up to the closing mark still counts as arguments.
Without a closing mark they end with the answer.
"""

import json
import re
from collections.abc import Collection

from quire.render.answers.feed import Feed, Marks, Reading
from quire.render.answers.json_reader import escaped, read_text, read_value, sendable, strict_json
from quire.render.answers.parameters import ParametersReader
from quire.render.answers.syntax import (
    CallSyntax,
    CodeBody,
    NamedBody,
    ObjectBody,
    ParametersBody,
    Tool,
)
from quire.render.answers.writer import Writer

MAX_NAME = 256
NONE = "null"  # arguments written as null mean an empty object
_NAME = re.compile(r"[\w.\-:/]*")


def can_read_name(name: str) -> bool:
    """Return whether the parser can read this tool name when it stands unquoted in the text."""
    return _NAME.fullmatch(name) is not None and len(name) <= MAX_NAME


class CallReader:
    """Read the calls of one answer. `tools` are the tools of the request."""

    def __init__(self, feed: Feed, writer: Writer, tools: Collection[Tool]) -> None:
        self._feed = feed
        self._writer = writer
        self._name = ""
        self._schemas = {tool.name: tool.parameters for tool in tools}

    def read(self, syntax: CallSyntax, opened: str) -> Reading[bool]:
        """Consume the calls of one section, whose opening word `opened` is already consumed.

        Return False if the section holds no call; the caller then rewinds the feed. On return the
        text after the last valid call is held."""
        feed = self._feed
        head = syntax.begin + syntax.open
        rest = head[head.index(opened) + len(opened) :]
        if not (yield from feed.spaced(rest)) or not (yield from self._read_call(syntax)):
            return False
        while True:
            feed.hold()
            if not (yield from self._read_between(syntax)):
                break
            if not (yield from self._read_call(syntax)):
                return True
        feed.rewind()
        feed.hold()
        if syntax.end and (yield from feed.spaced(syntax.end)):
            feed.hold()
        return True

    def _read_between(self, syntax: CallSyntax) -> Reading[bool]:
        """Consume the separator between two calls and the opening of the second call."""
        if not (syntax.begin or syntax.between.strip()):
            return False  # each such call opens a section of its own
        return (yield from self._feed.spaced(syntax.between + syntax.open))

    def _read_call(self, syntax: CallSyntax) -> Reading[bool]:
        body = syntax.body
        if isinstance(body, ObjectBody):
            return (yield from self._read_object(syntax, body))
        if isinstance(body, CodeBody):
            return (yield from self._read_code(body))
        if not (yield from self._read_name(body.after_name)):
            return False
        if isinstance(body, NamedBody):
            return (yield from self._read_arguments(syntax))
        return (yield from self._read_parameters(syntax, body))

    def _read_code(self, body: CodeBody) -> Reading[bool]:
        """Emit the rest of the answer as code if the request has a code tool; else return False."""
        name = next((name for name in body.tools if name in self._schemas), None)
        if name is None:
            return False
        feed, writer = self._feed, self._writer
        properties = (self._schemas[name] or {}).get("properties") or {"code": {}}
        feed.release()
        writer.begin_call(name)
        writer.arguments(f'{{{json.dumps(next(iter(properties)), ensure_ascii=False)}: "')
        feed.sink = lambda text: writer.arguments(escaped(text))
        yield from feed.until(Marks(()))
        feed.sink = None
        writer.arguments('"}')
        writer.end_call()
        feed.hold()
        return True

    def _read_name(self, after: str) -> Reading[bool]:
        """Consume a tool name and the text the syntax demands after the name."""
        feed = self._feed
        yield from feed.space()
        self._name = yield from feed.run(_NAME, MAX_NAME)
        return bool(self._name) and (yield from feed.spaced(after))

    def _read_arguments(self, syntax: CallSyntax) -> Reading[bool]:
        feed, writer = self._feed, self._writer
        yield from feed.space()
        if (yield from feed.literal(NONE)):
            feed.release()
            writer.begin_call(self._name)
            writer.arguments("{}")
            writer.end_call()
            yield from self._skip(syntax.close)
            return True
        if (yield from feed.peek()) != "{":
            return False
        feed.release()
        writer.begin_call(self._name)
        feed.sink = writer.arguments
        is_json = yield from read_value(feed)
        feed.sink = None
        if is_json:
            writer.end_call()
            yield from self._skip(syntax.close)
        else:
            yield from self._pass_on(syntax)
        return True

    def _read_parameters(self, syntax: CallSyntax, body: ParametersBody) -> Reading[bool]:
        feed, writer = self._feed, self._writer
        reader = ParametersReader(feed, writer, body, self._schemas.get(self._name))
        first, *others = syntax.close.split()
        key = None
        if (yield from feed.spaced(body.open)):
            key = yield from reader.read_key()
            if key is None:
                return False
        elif not (yield from feed.literal(first)):
            return False
        feed.release()
        writer.begin_call(self._name)
        if key is None:
            writer.arguments("{}")
            writer.end_call()
            yield from self._skip(" ".join(others))
            return True
        complete = yield from reader.read(key)
        writer.end_call()
        if complete:
            yield from self._skip(syntax.close)
        return True

    def _skip(self, text: str) -> Reading[None]:
        """Consume `text` if it follows, then hold the text after it."""
        self._feed.hold()
        if not (yield from self._feed.spaced(text)):
            self._feed.rewind()
        self._feed.hold()

    def _read_object(self, syntax: CallSyntax, body: ObjectBody) -> Reading[bool]:
        names = self._schemas.keys() if syntax.is_bare else None
        reader = _ObjectReader(self._feed, self._writer, body, names)
        if (yield from reader.read()):
            yield from self._skip(syntax.close)
        elif reader.is_open:
            yield from self._pass_on(syntax)
        elif reader.has_ended:
            self._feed.rewind()
            self._feed.hold()
        else:
            return False
        return True

    def _pass_on(self, syntax: CallSyntax) -> Reading[None]:
        """Emit the model's text as arguments up to the closing mark, and end the call."""
        feed, writer = self._feed, self._writer
        close = (syntax.close or syntax.end).strip()
        feed.sink = writer.arguments
        yield from feed.until(Marks((close,) if len(close) > 1 else ()))
        feed.sink = None
        writer.end_call()
        feed.hold()


class _ObjectReader:
    """Read one call written as a JSON object.

    names: tool names to accept; None accepts every name.
    is_open: whether the arguments have begun and not yet ended.
    has_ended: whether the arguments have ended; the text after them is held."""

    def __init__(
        self, feed: Feed, writer: Writer, body: ObjectBody, names: Collection[str] | None
    ) -> None:
        self._feed = feed
        self._writer = writer
        self._body = body
        self._names = names
        self._name: str | None = None
        self._arguments: str | None = None  # arguments seen before the name, or inside a string
        self.is_open = False
        self.has_ended = False

    def read(self) -> Reading[bool]:
        feed = self._feed
        if not (yield from feed.spaced("{")):
            return False
        yield from feed.space()
        if (yield from feed.literal("}")):
            return False
        while True:
            yield from feed.space()
            key = yield from read_text(feed)
            if key is None or not (yield from feed.spaced(":")):
                return False
            yield from feed.space()
            if not (yield from self._read_member(key)):
                return False
            if (yield from feed.spaced("}")):
                return self.has_ended or self._call_at_once()
            if not (yield from feed.spaced(",")):
                return False

    def _read_member(self, key: str) -> Reading[bool]:
        if key == self._body.name_key and self._name is None:
            self._name = yield from read_text(self._feed)
            return bool(self._name) and (self._names is None or self._name in self._names)
        if key not in self._body.arguments_keys or self.has_ended:
            if (yield from self._feed.peek()) == "{" and not self.has_ended:
                return False  # these may be the arguments, under a misspelt key
            return (yield from read_value(self._feed))
        if self._name is not None and (yield from self._feed.peek()) == "{":
            return (yield from self._stream(self._name))
        pieces: list[str] = []
        self._feed.sink = pieces.append
        is_json = yield from read_value(self._feed)
        self._feed.sink = None
        self._arguments = "".join(pieces)
        return is_json

    def _stream(self, name: str) -> Reading[bool]:
        feed = self._feed
        feed.release()
        self._writer.begin_call(name)
        self.is_open = True
        feed.sink = self._writer.arguments
        is_json = yield from read_value(feed)
        feed.sink = None
        if is_json:
            self._writer.end_call()
            self.is_open, self.has_ended = False, True
            feed.hold()
        return is_json

    def _call_at_once(self) -> bool:
        """Emit a complete call whose arguments were not streamed; return False if it is invalid."""
        arguments = _object_text(self._arguments or NONE)
        if not self._name or arguments is None:
            return False
        self._writer.begin_call(self._name)
        self._writer.arguments(arguments)
        self._writer.end_call()
        self.has_ended = True
        return True


def _object_text(value: str) -> str | None:
    """Return arguments as the text of a JSON object, or None for other values.

    The arguments may be wrapped in a JSON string. null becomes an empty object."""
    try:
        if value.startswith('"'):
            value = str(json.loads(value)).strip() or NONE
            if value != NONE:
                return sendable(value) if isinstance(strict_json(value), dict) else None
    except (ValueError, RecursionError):
        return None
    if value == NONE:
        return "{}"
    return value if value.startswith("{") else None
