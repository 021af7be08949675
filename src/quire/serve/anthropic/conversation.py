"""Messages made of blocks, as messages for chat templates.

In a user's message, each tool result becomes a message of its own, and so does each other block, in
order. An assistant's thoughts, texts and calls become one message. Adjacent messages of one role
are one turn, as in Anthropic's API. Errors are ApiErrors that name the block.
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

# Claude Code sends a header in such a block, which differs in each request. It is removed, because
# no two prompts would share a prefix with it.
BILLING = "x-anthropic-billing-header:"
FAILED = "Error: "  # prefix of a failed tool result, because templates have no flag for it
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
JOINED = {"content", "reasoning_content", "tool_calls"}  # fields that are lists until `_plain`
ALLOWED = {
    USER: ("text", "image", "tool_result"),
    ASSISTANT: ("text", "thinking", "redacted_thinking", "tool_use"),
    SYSTEM: ("text",),
}
OF_RESULTS = ("text", "image")


def chat_messages(system: str | Sequence[Block] | None, messages: Sequence[Block]) -> list[Json]:
    """Return a conversation as messages of chat completions."""
    found: list[Json] = []
    texts = [] if system is None else _system_texts(system)
    if texts:
        found.append({"role": SYSTEM, "content": texts})
    names: dict[str, str] = {}  # names of tools, by call id
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


def continues_last(messages: Sequence[Json]) -> bool:
    """Return whether the answer continues the last message. Raise ApiError if it cannot."""
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
    """Return a message's blocks, all of allowed types. A text becomes one text block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not content:
        raise bad_request(f"{where} must be a text or a list of blocks, got {shown(content)}.",
                          where)  # fmt: skip
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind not in allowed:
            described = shown(kind if isinstance(block, Mapping) else block)
            raise _wrong(
                f"{where}[{index}]", f".type must be one of {', '.join(allowed)}, got {described}"
            )  # fmt: skip
    return content


def _texts(blocks: Sequence[Block], where: str) -> list[str]:
    return [_text(block, "text", f"{where}[{index}]") for index, block in enumerate(blocks)]


def _text(block: Block, name: str, where: str, min_chars: int = 0) -> str:
    value = block.get(name)
    if not isinstance(value, str) or len(value) < min_chars:
        described = "a text that is not empty" if min_chars else "a text"
        raise _wrong(where, f".{name} must be {described}, got {shown(value)}")
    return value


def _user_messages(blocks: Sequence[Block], where: str, names: Mapping[str, str]) -> list[Json]:
    found: list[Json] = []
    for index, block in enumerate(blocks):
        where_block = f"{where}[{index}]"
        if block["type"] == "tool_result":
            found.append(_tool_message(block, where_block, names))
        else:
            found.append({"role": USER, "content": [_part(block, where_block)]})
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
        where_block = f"{where}[{index}]"
        match block["type"]:
            case "text":
                texts.append(_text(block, "text", where_block))
            case "thinking":
                thoughts.append(_text(block, "thinking", where_block))
            case "tool_use":
                calls.append(_call(block, where_block))
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
    """Join adjacent messages of one role, except tool results."""
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
    """Return a message in its final form, without empty fields. Its content is a text, or a list of
    parts if it has several parts or an image."""
    parts: list[Part] = message["content"]
    content: Any = [{"type": "text", "text": e} if isinstance(e, str) else e for e in parts]
    if not parts:  # an assistant's message with calls or thoughts only
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
