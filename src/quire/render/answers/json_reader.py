"""Incremental reader of one JSON value, which checks syntax and limits depth to MAX_DEPTH."""

import json
import re

from quire.render.answers.feed import Feed, Reading

MAX_DEPTH = 256
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_CHARS = re.compile(r"[-+.eE0-9]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]*")
_SPACE = re.compile(r"[ \t\n\r]*")
_ESCAPED = frozenset('"\\/bfnrt')
_WORDS = {"t": "true", "f": "false", "n": "null"}
_CLOSING = {"{": "}", "[": "]"}


def read_value(feed: Feed) -> Reading[bool]:
    """Consume one value; return False at the first invalid character."""
    open_: list[str] = []  # closing brackets of the objects and lists that are open
    while True:
        yield from feed.run(_SPACE)
        char = yield from feed.peek()
        if char in _CLOSING and len(open_) < MAX_DEPTH:
            feed.advance(1)
            open_.append(_CLOSING[char])
            yield from feed.run(_SPACE)
            if (yield from feed.peek()) != open_[-1]:
                if open_[-1] == "}" and not (yield from read_key(feed)):
                    return False
                continue
        elif not (yield from _read_scalar(feed, char)):
            return False
        if not (yield from _read_closings(feed, open_)):
            return False
        if not open_:
            return True


def read_key(feed: Feed) -> Reading[bool]:
    """Consume an object key and the colon after it."""
    yield from feed.run(_SPACE)
    if (yield from feed.peek()) != '"' or not (yield from _read_string(feed)):
        return False
    yield from feed.run(_SPACE)
    return (yield from feed.literal(":"))


def read_text(feed: Feed) -> Reading[str | None]:
    """Consume a JSON string and return its value; None if there is no string."""
    pieces: list[str] = []
    outer, feed.sink = feed.sink, pieces.append
    is_string = (yield from feed.peek()) == '"' and (yield from _read_string(feed))
    feed.sink = outer
    return str(json.loads("".join(pieces))) if is_string else None


def strict_json(text: str) -> object:
    """Parse JSON. Raises ValueError, also for NaN and infinities, or RecursionError."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def escaped(text: str) -> str:
    """Escape a text for use between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def sendable(text: str) -> str:
    r"""Escape lone surrogates in JSON text, so that UTF-8 can encode the text."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found.group()):04x}", text)


def _read_closings(feed: Feed, open_: list[str]) -> Reading[bool]:
    """Consume closing brackets after a value, up to the next comma and, in an object, its key."""
    while open_:
        yield from feed.run(_SPACE)
        if (yield from feed.literal(open_[-1])):
            open_.pop()
            continue
        if not (yield from feed.literal(",")):
            return False
        return open_[-1] == "]" or (yield from read_key(feed))
    return True


def _read_scalar(feed: Feed, char: str) -> Reading[bool]:
    if char == '"':
        return (yield from _read_string(feed))
    if char in _WORDS:
        return (yield from feed.literal(_WORDS[char]))
    digits: list[str] = []
    outer = feed.sink

    def take(text: str) -> None:
        digits.append(text)
        if outer is not None:
            outer(text)

    feed.sink = take
    yield from feed.run(_NUMBER_CHARS)
    feed.sink = outer
    return _NUMBER.fullmatch("".join(digits)) is not None


def _read_string(feed: Feed) -> Reading[bool]:
    feed.advance(1)
    while True:
        yield from feed.run(_PLAIN)
        char = yield from feed.peek()
        if char == '"':
            feed.advance(1)
            return True
        if char != "\\":
            return False
        feed.advance(1)
        char = yield from feed.peek()
        if char == "u":
            feed.advance(1)
            if not (yield from _read_hex(feed)):
                return False
        elif char in _ESCAPED:
            feed.advance(1)
        else:
            return False


def _read_hex(feed: Feed) -> Reading[bool]:
    count = 0
    while count < 4:
        char = yield from feed.peek()
        if not char or _HEX.fullmatch(char) is None:
            return False
        feed.advance(1)
        count += 1
    return True
