"""Custom tools, which take a text of any form instead of arguments.

    {"type": "custom", "name": "apply_patch"}     for clients
    apply_patch({"input": "*** Begin Patch ..."})  for the model: a function with one parameter

A grammar that a tool has for its text is told to the model in the description; the answer is not
bound to it.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from quire.render.templates.conversation import arguments_object
from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import bad_request

Json = dict[str, Any]

INPUT = "input"
PARAMETERS: Json = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The input text for the tool."}},
    "required": [INPUT],
    "additionalProperties": False,
}
MAX_HEAD_PIECES = 64  # in which the text of a call's input must begin, to be told as it comes
MAX_ESCAPE_CHARS = 12  # two halves of a pair
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_SURROGATE = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
# Characters of a JSON string that are whole: the first half of a pair is only with what follows.
_WHOLE = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|{_SURROGATE}(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{{4}})'
    rf"|(?!{_SURROGATE})\\u[0-9a-fA-F]{{4}})*"
)
_CUT_OFF = re.compile(rf"(?:{_SURROGATE})?(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?")


def custom_names(tools: Iterable[Json] | None) -> frozenset[str]:
    """Return the names of those tools that are custom ones."""
    return frozenset(tool["name"] for tool in tools or () if tool.get("type") == "custom")


def custom_function(tool: Json, where: str) -> Json:
    """Return the function that stands for a custom tool, whose name is checked. Raises ApiError."""
    description = tool.get("description")
    if not isinstance(description, str | None):
        text = f"{where}.description must be a text, got {shown(description)}."
        raise bad_request(text, f"{where}.description")
    texts = [description, _rule_of(tool.get("format"), f"{where}.format")]
    if told := "\n\n".join(filter(None, texts)):
        return {"name": tool["name"], "description": told, "parameters": PARAMETERS}
    return {"name": tool["name"], "parameters": PARAMETERS}


def arguments_of(text: str) -> str:
    """Return the arguments of the call of a function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputText:
    """The text of a call's input, out of arguments that come in pieces."""

    def __init__(self) -> None:
        self._arguments: list[str] = []  # all of them, until the text begins
        self._held = ""
        self._is_begun = False
        self._is_over = False
        self._is_raw = False  # it has an escape that is none, and goes on as it is

    def add(self, piece: str) -> str:
        """Return what is certain of the text by now, and was not before."""
        if self._is_over:
            return ""
        if not self._is_begun:
            piece = self._begin(piece)
        if self._is_raw or not self._is_begun:
            return piece
        self._held += piece
        end = self._end_of_whole()
        text, self._held = _decoded(self._held[:end]), self._held[end:]
        self._is_over = self._held.startswith('"')
        if self._is_over or len(self._held) <= MAX_ESCAPE_CHARS:
            return text
        text, self._held, self._is_raw = text + self._held, "", True
        return text

    def end(self) -> str:
        """Return the rest. Arguments of another form are the text as they are."""
        if self._is_over:
            return ""
        if self._is_begun:
            return "" if _CUT_OFF.fullmatch(self._held) else self._held
        arguments = "".join(self._arguments)
        found = arguments_object(arguments)
        text = found.get(INPUT)
        if isinstance(text, str):
            return _sendable(text)
        return arguments if found else ""

    def _begin(self, piece: str) -> str:
        """Take a piece that may hold where the text begins; returns what there is of the text."""
        self._arguments.append(piece)
        if len(self._arguments) > MAX_HEAD_PIECES:
            return ""
        head = "".join(self._arguments)
        found = _HEAD.match(head)
        self._is_begun = found is not None
        return "" if found is None else head[found.end() :]

    def _end_of_whole(self) -> int:
        found = _WHOLE.match(self._held)
        assert found is not None, "no characters are whole ones"
        return found.end()


def _rule_of(given: object, where: str) -> str:
    """Describe the form of a tool's text for the model. Raises ApiError."""
    form: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if given is None or form.get("type") == "text":
        return ""
    syntax, definition = form.get("syntax"), form.get("definition")
    if form.get("type") != "grammar" or not isinstance(definition, str):
        raise bad_request(
            f'{where} must be {{"type": "text"}}, or {{"type": "grammar"}} with syntax and'
            f" definition, got {shown(given)}.",
            where,
        )
    return f"The input must follow this {syntax} grammar:\n{definition}"


def _decoded(escaped: str) -> str:
    """Return what characters say that stand in a JSON string; those of control may be bare."""
    return _sendable(json.loads(f'"{escaped}"', strict=False))


def _sendable(text: str) -> str:
    """Return a text that UTF-8 can hold: a half of a surrogate pair is a question mark."""
    return text.encode("utf-8", "replace").decode()
