"""Convert arguments between a format's own marks to the text of a JSON object, while they arrive.

    <parameter=city>
    Oslo
    </parameter>            ->  {"city": "Oslo", "days": 3}
    <parameter=days>
    3
    </parameter>

Strings are emitted piece by piece. Other values are emitted when they are complete, because only
then is the type known.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from quire.render.answers.feed import Feed, Marks, Reading
from quire.render.answers.json_reader import escaped, read_value
from quire.render.answers.schema_types import is_text, property_schema, typed, types_of
from quire.render.answers.syntax import ParametersBody
from quire.render.answers.writer import Writer

MAX_KEY = 1024
_WITH_STRINGS = ('"', "{", "[")
_KEY = re.compile(r'[^<>"\n]*')


def can_read_key(key: str) -> bool:
    """Return whether the parser can read an argument with this name."""
    return _KEY.fullmatch(key) is not None and len(key) <= MAX_KEY and key == key.strip()


class ParametersReader:
    """Read the arguments of one call that has begun. `schema` is the schema of its parameters."""

    def __init__(
        self, feed: Feed, writer: Writer, body: ParametersBody, schema: Mapping[str, Any] | None
    ) -> None:
        self._feed = feed
        self._writer = writer
        self._body = body
        self._schema = schema or {}
        close = body.close.strip()
        self._marks = Marks((_newline_before(body.close) + close, close))

    def read(self, key: str | None) -> Reading[bool]:
        """Consume all arguments; `key`, the first argument's name, is already consumed.

        Return False if the text ends within an argument. Otherwise text after the arguments is
        held."""
        feed, writer = self._feed, self._writer
        before = "{"
        while key is not None:
            feed.release()
            writer.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            if not (yield from self._read_value(key)):
                return False
            feed.hold()
            key = None
            if (yield from feed.spaced(self._body.open)):
                key = yield from self.read_key()
        feed.rewind()
        feed.hold()
        writer.arguments("}")
        return True

    def read_key(self) -> Reading[str | None]:
        """Consume and return a key and the mark after it; return None if either is missing."""
        key = yield from self._feed.run(_KEY, MAX_KEY)
        return key.strip() if (yield from self._feed.spaced(self._body.after_key)) else None

    def _read_value(self, key: str) -> Reading[bool]:
        feed, writer = self._feed, self._writer
        schema = property_schema(self._schema, key)
        if self._body.after_key.endswith("\n"):
            yield from feed.literal("\n")
        if is_text(schema, self._schema):
            writer.arguments('"')
            feed.sink = self._escape
            mark = yield from feed.until(self._marks)
            feed.sink = None
            writer.arguments('"' if mark is not None else "")
            return mark is not None
        types = types_of(schema, self._schema)
        value = yield from self._read_json()
        if value is not None:
            writer.arguments(typed(value, types))
            return True
        pieces: list[str] = []
        feed.sink = pieces.append
        mark = yield from feed.until(self._marks)
        feed.sink = None
        text = "".join(pieces)
        writer.arguments(text if mark is None else typed(text, types))
        return mark is not None

    def _read_json(self) -> Reading[str | None]:
        """Consume a string, object or list and the closing mark; return the value's JSON text.

        Strings within the value may contain the closing mark. Return None, with nothing consumed,
        if there is no such value."""
        feed, pieces = self._feed, list[str]()
        feed.hold()
        feed.sink = pieces.append
        begins = (yield from feed.peek()) in _WITH_STRINGS
        is_json = begins and (yield from read_value(feed))
        feed.sink = None
        if is_json and (yield from feed.spaced(self._body.close)):
            feed.release()
            return "".join(pieces)
        feed.rewind()
        return None

    def _escape(self, text: str) -> None:
        self._writer.arguments(escaped(text))


def _newline_before(close: str) -> str:
    return "\n" if close.startswith("\n") else ""
