"""Custom tools, which accept free text instead of arguments.

    {"type": "custom", "name": "apply_patch"}     for clients
    apply_patch({"input": "*** Begin Patch ..."})  for the model: a function with one parameter

If a tool has a grammar, the description shows it to the model, but decoding is not constrained.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
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
MAX_HEAD_PIECES = 64  # limit of deltas before an input's text begins; later ones are not streamed
MAX_ESCAPE_CHARS = 12  # both halves of a surrogate pair
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_SURROGATE = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
# Complete characters of a JSON string; the first half of a pair is complete only with its second
_WHOLE = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|{_SURROGATE}(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{{4}})'
    rf"|(?!{_SURROGATE})\\u[0-9a-fA-F]{{4}})*"
)
_CUT_OFF = re.compile(rf"(?:{_SURROGATE})?(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?")


def described_tools(tools: Sequence[Json] | None) -> list[Json]:
    """Return the tools as a response shows them: functions with all of their fields."""
    unset = dict.fromkeys(("description", "parameters", "strict"))
    return [unset | tool if tool.get("type") == "function" else tool for tool in tools or ()]


def custom_names(tools: Iterable[Json] | None) -> frozenset[str]:
    """Return the names of the custom tools."""
    return frozenset(tool["name"] for tool in tools or () if tool.get("type") == "custom")


def custom_function(tool: Json, where: str) -> Json:
    """Return the function that represents a custom tool, whose name is valid. Raises ApiError."""
    description = tool.get("description")
    if not isinstance(description, str | None):
        text = f"{where}.description must be a text, got {shown(description)}."
        raise bad_request(text, f"{where}.description")
    texts = [description, _rule_of(tool.get("format"), f"{where}.format")]
    if full_description := "\n\n".join(filter(None, texts)):
        return {"name": tool["name"], "description": full_description, "parameters": PARAMETERS}
    return {"name": tool["name"], "parameters": PARAMETERS}


def arguments_of(text: str) -> str:
    """Return the JSON arguments of a call to a custom tool's function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class InputText:
    """Extractor of the input text of a custom tool's call from arguments that arrive in deltas."""

    def __init__(self) -> None:
        self._arguments: list[str] = []  # all arguments until the text begins
        self._held = ""
        self._is_begun = False
        self._is_over = False
        self._is_raw = False  # whether an invalid escape was met, after which text passes unchanged

    def add(self, piece: str) -> str:
        """Add a delta of the arguments; return the text that becomes certain with it."""
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
        """Return the rest of the text. Arguments without an input field are returned unchanged."""
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
        """Add a delta before or at the text's beginning; return the text in it."""
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
    """Return a description of the tool's grammar for the model. Raises ApiError."""
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
    """Return the decoded contents of a JSON string, which may contain raw control characters."""
    return _sendable(json.loads(f'"{escaped}"', strict=False))


def _sendable(text: str) -> str:
    """Return the text with question marks for lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode()
