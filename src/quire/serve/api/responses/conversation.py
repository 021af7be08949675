"""Items to the messages that chat templates know.

An assistant's turn is several items (reasoning, message, calls) and one message.
"""

from collections.abc import Iterable
from typing import Any

from quire.serve.api.responses.custom_tools import arguments_of

Json = dict[str, Any]
INSTRUCTING = ("system", "developer")


def messages_of(instructions: str | None, items: Iterable[Json]) -> list[Json]:
    """Return the messages of items, which hold no references. Instructions come first; with those
    that a conversation begins with they are one message, because many templates take one."""
    found: list[Json] = []
    if instructions:
        found.append({"role": "system", "content": instructions})
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            _add_message(found, item["role"], _texts(item["content"]))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = item["output"]
            text = output if isinstance(output, str) else "\n".join(_texts(output))
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})
        else:
            _add_to_turn(_turn(found, item), item)
    return found


def _add_message(found: list[Json], role: str, texts: list[str]) -> None:
    begins = len(found) == 1 and found[0]["role"] == "system" and role in INSTRUCTING
    if begins and isinstance(found[0]["content"], str):
        found[0]["content"] = "\n\n".join([found[0]["content"], *texts])
    elif len(texts) == 1:
        found.append({"role": role, "content": texts[0]})
    else:
        content = [{"type": "text", "text": text} for text in texts]
        found.append({"role": role, "content": content})


def _turn(found: list[Json], item: Json) -> Json:
    """Return the message of the assistant's turn that goes on, or a new one: reasoning begins one
    where something else was written, and so does a text behind calls."""
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
