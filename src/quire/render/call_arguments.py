"""Arguments of a past call, as a JSON object or as text: whichever is needed, from whichever came.

Clients send back what a model wrote, so it may be cut off, or be no JSON at all. Neither is an
error: a conversation with such a call can go on.
"""

import json
import re
from typing import Any

INVALID = "INVALID_JSON"  # the only name in the arguments of a call that has no JSON object
_CLOSING = {"{": "}", "[": "]"}
# Of JSON: a string, with its end if it has one, or what structures objects and lists.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\],]', re.DOTALL)
# What may follow the last whole value of a text that is cut off: a name, or a word or a number.
_CUT_OFF = re.compile(
    r'\s*,?\s*(?:"[^"\\]*(?:\\.[^"\\]*)*(?:"\s*(?::\s*)?)?)?'
    r"(?:tr?u?|fa?l?s?|nu?l?|[-+.eE0-9]+)?",
    re.DOTALL,
)
# An escape that is cut off, or the first half of two that belong together; with it what is before.
_HALF_ESCAPE = re.compile(
    r"(?<!\\)((?:\\\\)*)(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\u[0-9a-fA-F]{0,3})?$"
)


def arguments_object(given: object) -> dict[str, Any]:
    """Return arguments as an object. Of a text that is cut off, return what is there of it; what is
    no object stands under the name INVALID."""
    if isinstance(given, dict):
        return given
    text = arguments_text(given)
    for candidate in (text, *_ended(text)):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {INVALID: text}
    return {INVALID: text}


def arguments_text(given: object) -> str:
    """Return arguments as text, unchanged if they are one. No arguments are an empty object."""
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return "{}" if text.strip() in ("", "null") else text


def _ended(text: str) -> list[str]:
    """Return a JSON text that is cut off with an end, in two ways: behind all of it, which is JSON
    unless a name or a word is cut off, and behind its last whole value. Return none of a text that
    is not cut off."""
    open_: list[str] = []  # what closes the objects and lists around here
    whole = 0  # where the last whole value ends
    last = ""
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word.startswith('"'):
            if not token[1]:
                text, last = _HALF_ESCAPE.sub(r"\1", text[: token.end()]), '"'
            continue
        whole = token.start() if word == "," else token.end()
        if word in _CLOSING:
            open_.append(_CLOSING[word])
        elif word != "," and open_:
            open_.pop()
            if not open_:
                return []
    closing = "".join(reversed(open_))
    ended = [text + last + closing]
    return [*ended, text[:whole] + closing] if _CUT_OFF.fullmatch(text, whole) else ended
