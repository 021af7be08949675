"""Tools as clients describe them."""

from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.render.answers.syntax import Tool
from quire.render.answers.tools import tools_of

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def test_tools_are_read_from_their_descriptions() -> None:
    described = [
        {"type": "function", "function": {"name": "a", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "b", "parameters": None, "description": "x"}},
        {"name": "c", "parameters": SCHEMA},
    ]
    expected = (Tool("a", SCHEMA, True), Tool("b"), Tool("c", SCHEMA))
    assert tools_of(described) == expected


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search"}, "of type 'web_search'"),
        ({"type": "function"}, "needs a function with a name"),
        ({"type": "function", "function": "f"}, "needs a function with a name"),
        ({"type": "function", "function": {"name": ""}}, "needs a function with a name"),
        ({"type": "function", "function": {"name": "f"}}, "another tool is also called 'f'"),
        ({"function": {"name": "g", "parameters": "object"}}, "must be a JSON schema, got str"),
    ],
)
def test_malformed_tools_are_rejected(tool: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        tools_of([{"type": "function", "function": {"name": "f"}}, tool])
    assert caught.value.field == "tools[1]"
