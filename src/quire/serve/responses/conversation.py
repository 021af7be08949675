"""Conversion of items to the messages of chat templates. An assistant's turn is several items
(reasoning, message, calls) but a single message."""

from collections.abc import Iterable
from typing import Any

from quire.serve.media.parts import ImagePart
from quire.serve.responses.custom_tools import arguments_of

Json = dict[str, Any]
Part = str | ImagePart
INSTRUCTING = ("system", "developer")


def messages_of(
    instructions: str | None, items: Iterable[Json], num_earlier: int = 0
) -> list[Json]:
    """Return the messages of items, which contain no references. Instructions come first, merged
    with system messages at the start, because many templates accept only one. num_earlier: number
    of leading items from earlier responses."""
    found: list[Json] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    for index, item in enumerate(items, -num_earlier):
        where = f"input[{index}]" if index >= 0 else "previous_response_id"
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            _add_message(found, item["role"], _parts(item["content"], f"{where}.content"))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = _tool_content(item["output"], f"{where}.output")
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        else:
            _add_to_turn(_turn(found, item), item)
    return found


def _add_message(found: list[Json], role: str, parts: list[Part]) -> None:
    begins = len(found) == 1 and found[0]["role"] == "system" and role in INSTRUCTING
    texts = [each for each in parts if isinstance(each, str)]
    is_text = len(texts) == len(parts)
    if begins and is_text and isinstance(found[0]["content"], str):
        found[0]["content"] = "\n\n".join([found[0]["content"], *texts])
    elif is_text and len(texts) == 1:
        found.append({"role": role, "content": texts[0]})
    else:
        found.append({"role": role, "content": _content(parts)})


def _tool_content(output: str | list[Json], where: str) -> str | list[Any]:
    """Return the output of a tool: a text, or parts if there are images."""
    if isinstance(output, str):
        return output
    parts = _parts(output, where)
    texts = [each for each in parts if isinstance(each, str)]
    return "\n".join(texts) if len(texts) == len(parts) else _content(parts)


def _content(parts: list[Part]) -> list[Any]:
    return [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]


def _parts(parts: Iterable[Json], where: str) -> list[Part]:
    """Return the parts as texts and images."""
    return [
        ImagePart(part["image_url"], f"{where}[{index}].image_url")
        if part["type"] == "input_image"
        else part["text"]
        for index, part in enumerate(parts)
    ]


def _turn(found: list[Json], item: Json) -> Json:
    """Return the message of the assistant's present turn, or a new one. A reasoning item begins a
    new turn after text or calls, and so does a text after text or calls."""
    last = found[-1] if found else {}
    is_new = last.get("role") != "assistant"
    if item["type"] == "reasoning":
        is_new = is_new or bool(last["content"]) or "tool_calls" in last
    elif item["type"] == "message":
        is_new = is_new or "tool_calls" in last or bool(last["content"])
    if is_new:
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _add_to_turn(turn: Json, item: Json) -> None:
    if item["type"] == "reasoning":
        text = "\n".join(_texts(item.get("content") or item.get("summary") or []))
        before = turn.get("reasoning_content")
        if text:
            turn["reasoning_content"] = f"{before}\n{text}" if before else text
    elif item["type"] == "message":
        turn["content"] = "".join(_texts(item["content"]))
    else:
        is_custom = item["type"] == "custom_tool_call"
        arguments = arguments_of(item["input"]) if is_custom else item["arguments"]
        function = {"name": item["name"], "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _texts(parts: Iterable[Json]) -> list[str]:
    return [part["text"] for part in parts]
