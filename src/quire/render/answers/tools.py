"""The tools of a request, as OpenAI's clients describe them."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.render.answers.syntax import Tool
from quire.render.templates.conversation import described_function


def tools_of(described: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return the tools of a request.

    Each is {"type": "function", "function": {name, parameters, strict}}, or only the inner object.
    Raises RequestError for other types, invalid functions and duplicate names."""
    found: dict[str, Tool] = {}
    for index, tool in enumerate(described):
        where = f"tools[{index}]"
        kind = tool.get("type", "function")
        if kind != "function":
            raise RequestError(f"{where} is of type {kind!r}; only function is possible.", where)
        function = described_function(tool, where)
        name: str = function["name"]
        if name in found:
            message = f"{where}: another tool is also called {name!r}; give each its own name."
            raise RequestError(message, where)
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, Mapping):
            message = f"{where}: parameters must be a JSON schema, got {type(schema).__name__}."
            raise RequestError(message, where)
        found[name] = Tool(name, schema, bool(function.get("strict")))
    return tuple(found.values())
