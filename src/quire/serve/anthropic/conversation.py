"""Messages made of blocks, as the messages that chat templates know.

What a user's message says beside results of tools becomes messages of its own, in its place. What
an assistant's message thinks, says and calls becomes one message. Neighbours of one role are one
turn, as Anthropic has it. Raises ApiError, which names the block.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import ApiError, bad_request
from quire.serve.media.parts import ImagePart, read_block

Json = dict[str, Any]
Block = Mapping[str, Any]
Part = str | ImagePart

# A block of this kind is a header of Claude Code's, another one for each request: with it in the
# prompt no two prompts would begin alike.
BILLING = "x-anthropic-billing-header:"
FAILED = "Error: "  # how a result of a tool says that it is one; templates know no flag
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
JOINED = {"content", "reasoning_content", "tool_calls"}  # lists, until all turns are joined
ALLOWED = {
    USER: ("text", "image", "tool_result"),
    ASSISTANT: ("text", "thinking", "redacted_thinking", "tool_use"),
    SYSTEM: ("text",),
}
OF_RESULTS = ("text", "image")


def chat_messages(system: str | Sequence[Block] | None, messages: Sequence[Block]) -> list[Json]:
    """Return a conversation as chat completions take it."""
    found: list[Json] = []
    texts = [] if system is None else _system_texts(system)
    if texts:
        found.append({"role": SYSTEM, "content": texts})
    names: dict[str, str] = {}  # of tools, by the ids of calls
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str) or role not in ALLOWED:
            roles = ", ".join(ALLOWED)
            raise bad_request(f"{where}.role must be one of {roles}, got {shown(role)}.", where)
        blocks = _blocks(message.get("content"), f"{where}.content", ALLOWED[role])
        if role == USER:
            found += _user_messages(blocks, f"{where}.content", names)
        elif role == ASSISTANT:
            found.append(_assistant_message(blocks, f"{where}.content", names))
        else:
            found.append({"role": SYSTEM, "content": _texts(blocks, f"{where}.content")})
    return [_plain(message) for message in _turns(found)]


def goes_on(messages: Sequence[Json]) -> bool:
    """Tell whether an answer continues the last message of a chat, which is the assistant's."""
    last = messages[-1]
    if last["role"] != ASSISTANT:
        return False
    if last.get("tool_calls"):
        raise bad_request("messages end with a tool_use; add its tool_result.", "messages")
    if not last.get("content"):
        raise bad_request(
            "messages end with a message of the assistant without text, which cannot be continued;"
            " add text to it, or remove it.",
            "messages",
        )
    return True


def _system_texts(system: str | Sequence[Block]) -> list[str]:
    texts = _texts(_blocks(system, "system", ALLOWED[SYSTEM]), "system")
    return [text for text in texts if not text.startswith(BILLING)]


def _blocks(content: object, where: str, allowed: Sequence[str]) -> list[Block]:
    """Return the blocks of a content, which are of allowed types. A text is a block of text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise bad_request(f"{where} must be a text or a list of blocks, got {shown(content)}.",
                          where)  # fmt: skip
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in allowed:
            what = shown(kind if isinstance(block, Mapping) else block)
            raise _wrong(
                f"{where}[{index}]", f".type must be one of {', '.join(allowed)}, got {what}"
            )  # fmt: skip
    return content


def _texts(blocks: Sequence[Block], where: str) -> list[str]:
    return [_text(block, "text", f"{where}[{index}]") for index, block in enumerate(blocks)]


def _text(block: Block, name: str, where: str, least: int = 0) -> str:
    value = block.get(name)
    if not isinstance(value, str) or len(value) < least:
        what = "a text that is not empty" if least else "a text"
        raise _wrong(where, f".{name} must be {what}, got {shown(value)}")
    return value


def _user_messages(blocks: Sequence[Block], where: str, names: Mapping[str, str]) -> list[Json]:
    found: list[Json] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        if block["type"] == "tool_result":
            found.append(_tool_message(block, place, names))
        else:
            found.append({"role": USER, "content": [_part(block, place)]})
    return found


def _part(block: Block, where: str) -> Part:
    return _text(block, "text", where) if block["type"] == "text" else read_block(block, where)


def _tool_message(block: Block, where: str, names: Mapping[str, str]) -> Json:
    call_id = _text(block, "tool_use_id", where)
    content = block.get("content")
    parts: list[Part] = [""]
    if content is not None and content != []:
        where = f"{where}.content"
        blocks = _blocks(content, where, OF_RESULTS)
        parts = [_part(each, f"{where}[{index}]") for index, each in enumerate(blocks)]
    if block.get("is_error"):
        first, *rest = parts
        parts = [FAILED + first, *rest] if isinstance(first, str) else [FAILED, *parts]
    name = {"name": names[call_id]} if call_id in names else {}
    return {"role": "tool", "tool_call_id": call_id, **name, "content": parts}


def _assistant_message(blocks: Sequence[Block], where: str, names: dict[str, str]) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for index, block in enumerate(blocks):
        place = f"{where}[{index}]"
        match block["type"]:
            case "text":
                texts.append(_text(block, "text", place))
            case "thinking":
                thoughts.append(_text(block, "thinking", place))
            case "tool_use":
                calls.append(_call(block, place))
                names[calls[-1]["id"]] = calls[-1]["function"]["name"]
    return {
        "role": ASSISTANT, "content": texts, "reasoning_content": thoughts, "tool_calls": calls,
    }  # fmt: skip


def _call(block: Block, where: str) -> Json:
    call_id, name = _text(block, "id", where, 1), _text(block, "name", where, 1)
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise _wrong(where, f".input must be an object, got {shown(given)}")
    try:
        arguments = json.dumps(given, ensure_ascii=False)
    except RecursionError:
        raise _wrong(where, ".input is nested too deeply") from None
    return {
        "id": call_id, "type": "function", "function": {"name": name, "arguments": arguments},
    }  # fmt: skip


def _turns(messages: Sequence[Json]) -> list[Json]:
    """Join neighbours of one role; results of tools stay apart."""
    found: list[Json] = []
    for message in messages:
        last = found[-1] if found else {}
        if message["role"] != last.get("role") or message["role"] == "tool":
            found.append(message)
            continue
        for name in JOINED & message.keys():
            last[name].extend(message[name])
    return found


def _plain(message: Json) -> Json:
    """Return a message with its text, or texts and images as parts, and without what it has none
    of."""
    parts: list[Part] = message["content"]
    content: Any = [{"type": "text", "text": e} if isinstance(e, str) else e for e in parts]
    if not parts:  # of the assistant, with calls or thoughts
        content = None
    elif len(parts) == 1 and isinstance(parts[0], str):
        content = parts[0]
    plain = message | {"content": content}
    thoughts = [text for text in plain.pop("reasoning_content", ()) if text]
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    return plain


def _wrong(where: str, rule: str) -> ApiError:
    return bad_request(f"{where}{rule}.", where)
