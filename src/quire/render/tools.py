"""Tool calls in a model's output, in the format of Hermes and Qwen.

    text <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

What cannot be read as a call stays text: nothing that the model wrote is lost.
"""

import json
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for. arguments: a JSON object, as text."""

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text around the calls, without the white space at its ends, and the calls in
    order.

    A text without a call comes back unchanged. The last call may lack its closing tag.
    """
    calls: list[ToolCall] = []
    kept: list[str] = []
    done = 0
    at = text.find(OPEN)
    while at >= 0:
        found = _read_block(text, at + len(OPEN))
        if found is not None:
            call, end = found
            calls.append(call)
            kept.append(text[done:at])
            done = end
        at = text.find(OPEN, max(done, at + len(OPEN)))
    kept.append(text[done:])
    return ("".join(kept).strip(), calls) if calls else (text, [])


def _read_block(text: str, start: int) -> tuple[ToolCall, int] | None:
    """Return the call whose JSON begins at `start`, and where its block ends; None if there is
    none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, _skip_space(text, start))
    except (ValueError, RecursionError):
        return None
    end = _skip_space(text, end)
    if text.startswith(CLOSE, end):
        end += len(CLOSE)
    elif end < len(text):
        return None
    call = _read_call(value)
    return None if call is None else (call, end)


def _skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _read_call(value: object) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON inside of a text
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))
