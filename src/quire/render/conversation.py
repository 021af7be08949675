"""Messages of a conversation: checked, and brought into the form that chat templates expect.

A message is {"role": ..., "content": text or list of parts, ...}; a part is a text or
{"type": "text", "text": ...}. Further fields (name, tool_calls, tool_call_id, reasoning_content and
what a model's template knows) are handed on as plain data. The caller's objects are not changed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError

TEXT_PARTS = ("text", "input_text", "output_text")
REASONING = ("reasoning_content", "reasoning", "thinking")
MAX_DEPTH = 64
Message = dict[str, Any]


def prepare_messages(messages: object, parts_wanted: bool, strings_too: bool) -> list[Message]:
    """Checked copies of the messages. Raises RequestError that names the message at fault.

    parts_wanted: the template goes through the parts of a content; otherwise their texts are
    joined by line ends. strings_too: such a template takes a content that is a text as well.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError("a conversation must be a non-empty list of messages.")
    out = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _wrong(index, f"must be an object with a role, got {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise _wrong(index, f"needs a role such as user or assistant, got {role!r}")
        plain: Message = plain_data(dict(message), f"messages[{index}]")
        _set_content(plain, index, parts_wanted, strings_too)
        _set_tool_calls(plain, index)
        _set_reasoning(plain)
        out.append(plain)
    return out


def prepare_tools(tools: object) -> list[Message] | None:
    """Checked copies of tool descriptions ({"type": "function", "function": {...}}), or None."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise RequestError(f"tools must be a list of objects, got {type(tools).__name__}.", "tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            message = f"tools[{index}] must be an object, got {type(tool).__name__}."
            raise RequestError(message, f"tools[{index}]")
        described_function(tool, f"tools[{index}]")
    return [plain_data(dict(tool), "tools") for tool in tools]


def described_function(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return what a tool's description says of its function. Raise RequestError that names `where`
    if this has no name."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where} needs a function with a name.", where)
    found: Mapping[str, Any] = function
    return found


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy made of JSON's types only, so that a template can reach nothing else."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} levels deep.", where)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, str):  # a subclass, such as an enum's member; also below
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        return [plain_data(item, where, depth + 1) for item in value]
    raise RequestError(
        f"{where} holds a {type(value).__name__}; use texts, numbers, lists and objects only.",
        where,
    )


def _wrong(index: int, rule: str) -> RequestError:
    """Refuse a message that is none."""
    return RequestError(f"messages[{index}] {rule}.", f"messages[{index}]")


def _wrong_part(index: int, rule: str) -> RequestError:
    """Refuse something in a message; the field is all of them."""
    return RequestError(f"messages[{index}] {rule}.")


def _set_content(message: Message, index: int, parts_wanted: bool, strings_too: bool) -> None:
    """Set parts or text, as the template wants it; an answer of tool calls alone has empty text."""
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise _wrong(index, f"needs a content, which only an assistant's message ({message['role']}"
                            " is the role here) may lack")  # fmt: skip
    if content is None or isinstance(content, str):
        text = content or ""
        as_parts = parts_wanted and not strings_too and text != ""
        message["content"] = [{"type": "text", "text": text}] if as_parts else text
    elif isinstance(content, list):
        texts = [_part_text(part, index) for part in content]
        parts = [{"type": "text", "text": text} for text in texts]
        message["content"] = parts if parts_wanted else "\n".join(texts)
    else:
        kind = type(content).__name__
        raise _wrong_part(
            index, f"has a content of type {kind}; it must be a text or a list of text parts"
        )


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _wrong_part(index, f"has a part of type {type(part).__name__}; it must be an object")
    kind = part.get("type", "text")
    if kind not in TEXT_PARTS:
        raise _wrong_part(index, f"has a part of type {kind!r}; this model takes text parts only")
    if not isinstance(part.get("text"), str):
        raise _wrong_part(index, "has a text part without a text")
    return str(part["text"])


def _set_tool_calls(message: Message, index: int) -> None:
    """Parse the arguments of tool calls: templates want an object, clients send JSON text."""
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
        return
    if not isinstance(calls, list):
        raise _wrong_part(
            index, f"has tool_calls of type {type(calls).__name__}; it must be a list"
        )
    if not calls:
        del message["tool_calls"]  # templates ask only whether there are any
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong_part(index, "has a tool call without a function name")
        arguments = function.get("arguments")
        if arguments is None:
            function["arguments"] = {}
        elif isinstance(arguments, str):
            function["arguments"] = _parsed(arguments, index)


def _parsed(arguments: str, index: int) -> Any:
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _wrong_part(
            index, f"has a tool call whose arguments are not JSON ({error})"
        ) from error


def _set_reasoning(message: Message) -> None:
    """Reasoning goes by three names; templates read one or another of them."""
    given = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if given is not None:
        message["reasoning_content"] = given
        message.setdefault("thinking", given)
