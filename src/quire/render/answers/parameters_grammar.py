"""Grammar rules for arguments between a format's own marks, as read by `parameters.py`."""

import re
from collections.abc import Mapping
from typing import Any

from quire.base.errors import RequestError
from quire.base.requests.structured_outputs import StructuredOutputsParams
from quire.render.answers.parameters import can_read_key
from quire.render.answers.schema_types import alternatives, is_text, property_schema, resolved
from quire.render.answers.syntax import ParametersBody, Tool
from quire.render.grammars.lark import ANY_TEXT, Lark, regex
from quire.render.grammars.structured import content_rule

_DEFINITIONS = ("$defs", "definitions")
NO_WORDS = "which is ambiguous in the format of this model's calls"


def parameters_rule(lark: Lark, body: ParametersBody, tool: Tool, field: str) -> str:
    """Add rules for a tool's arguments, in the schema's order; return the first rule's name.

    Raises RequestError if the format cannot write the arguments."""
    schema = tool.parameters or {}
    outline = resolved(schema, schema)
    required, properties = outline.get("required", []), outline.get("properties", {})
    if not isinstance(required, list) or not isinstance(properties, Mapping):
        message = f"{field}: properties of {tool.name!r} must be an object, and required a list."
        raise RequestError(message, field)
    parts = []
    for name in dict.fromkeys((*properties, *map(str, required))):
        if not can_read_key(name):
            message = f"{field}: {tool.name!r} has an argument {name!r}, {NO_WORDS}; rename it."
            raise RequestError(message, field)
        one = _parameter(lark, body, name, schema, field)
        parts.append(one if name in required else f"({one})?")
    return lark.rule(" ".join(parts) or '""')


def _parameter(
    lark: Lark, body: ParametersBody, name: str, root: Mapping[str, Any], field: str
) -> str:
    """Return the expression for one argument."""
    schema = property_schema(root, name)
    before = f"{lark.literal(body.open)} {lark.spelled(name)} {lark.literal(body.after_key)}"
    close = body.close.rstrip()
    space = body.close[len(close) :]
    after = f" ({lark.literal(space)})?" if space else ""
    if is_text(schema, root):
        each = [_text(lark, close, one, field) for one in alternatives(schema, root)]
        return f"{before} ({' | '.join(each)}){after}"
    constraint = StructuredOutputsParams(
        json=_with_definitions(schema, root), disable_additional_properties=True
    )
    return f"{before} {content_rule(lark, constraint, field=field)} {lark.literal(close)}{after}"


def _text(lark: Lark, close: str, schema: Mapping[str, Any], field: str) -> str:
    """Return the expression for an unquoted string and its closing mark."""
    choice = [schema["const"]] if "const" in schema else schema.get("enum")
    if choice is not None:
        mark, given = close.strip(), choice if isinstance(choice, list) else []
        texts = [text for text in given if isinstance(text, str) and mark not in text]
        if not texts:
            raise RequestError(
                f"{field}: a string must be one of {choice!r:.99}, {NO_WORDS}.", field
            )
        return f"({' | '.join(map(lark.spelled, texts))}) {lark.literal(close)}"
    parts = [ANY_TEXT, "~" + regex(f"(?s:.*){re.escape(close.strip())}(?s:.*)")]
    unbounded = len(parts)
    min_length, max_length = schema.get("minLength", 0), schema.get("maxLength", "")
    if min_length or max_length != "":
        parts.append(f"/(?s:.{{{min_length},{max_length}}})/")
    if isinstance(schema.get("pattern"), str):
        parts.append(_searched(schema["pattern"]))
    # Where every character counts, so does the line break that is not the string's.
    end = close.lstrip() if len(parts) == unbounded else close
    return lark.until([end], lark.terminal(" & ".join(parts)))


def _searched(pattern: str) -> str:
    """Return the terminal for texts that contain a match of a JSON Schema pattern."""
    begins = "" if pattern.startswith("^") else "(?s:.*)"
    ends = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    return regex(f"{begins}({pattern.removeprefix('^')[: None if ends else -1]}){ends}")


def _with_definitions(schema: object, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of one part together with the root's definitions."""
    if not isinstance(schema, Mapping):
        return {}
    return {key: root[key] for key in _DEFINITIONS if key in root} | dict(schema)
