"""Reader of a response's input: validates items, completes their ids and normalises their form.

Further fields of an item (`status`, `phase`, annotations, ...) do not reach the model and are
dropped. Errors name the item.
"""

from collections.abc import Callable, Mapping
from typing import Any

from quire.serve.bodies.validation_errors import shown
from quire.serve.errors import ApiError, bad_request
from quire.serve.media.parts import read_part

Json = dict[str, Any]
NewId = Callable[[str], str]  # from a kind such as msg

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
MAX_ID_CHARS = 256
KINDS = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output,"
    " reasoning and item_reference"
)


def read_items(given: object, new_id: NewId) -> list[Json]:
    """Return the items of `input`; references stay unresolved. Raises ApiError."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input", new_id)]
    if not isinstance(given, list):
        raise bad_request(f"input must be a text or a list of items, got {shown(given)}.", "input")
    return [_item(each, f"input[{index}]", new_id) for index, each in enumerate(given)]


def _item(given: object, where: str, new_id: NewId) -> Json:
    if isinstance(given, str):
        return _message({"role": "user", "content": given}, where, new_id)
    if not isinstance(given, Mapping):
        raise _wrong(where, f"must be an object, got {shown(given)}")
    kind = given.get("type")
    if kind is None:
        kind = "message" if "role" in given else "item_reference"
    read = READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise _wrong(f"{where}.type", f"must be one of {KINDS}, got {shown(kind)}; remove it")
    return read(given, where, new_id)


def _message(given: Mapping[str, Any], where: str, new_id: NewId) -> Json:
    role = given.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    content = given.get("content")
    if role == "assistant":
        texts = [content] if isinstance(content, str) else _texts(content, f"{where}.content")
        parts = [_output_text(text) for text in texts]
    elif isinstance(content, str):
        parts = [{"type": "input_text", "text": content}]
    else:
        parts = _input_parts(content, f"{where}.content")
    head = {"type": "message", "id": _id(given, where, "msg", new_id), "status": "completed"}
    return head | {"role": role, "content": parts}


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _function_call(given: Mapping[str, Any], where: str, new_id: NewId) -> Json:
    """Return a call. Its arguments may be truncated or invalid JSON, since a model wrote them."""
    if given.get("arguments", "") is None:
        given = {**given, "arguments": "{}"}
    return {
        "type": "function_call",
        "id": _id(given, where, "fc", new_id),
        "call_id": _text(given, "call_id", where),
        "name": _text(given, "name", where),
        "arguments": _text(given, "arguments", where),
        "status": "completed",
    }


def _custom_tool_call(given: Mapping[str, Any], where: str, new_id: NewId) -> Json:
    return {
        "type": "custom_tool_call",
        "id": _id(given, where, "ctc", new_id),
        "call_id": _text(given, "call_id", where),
        "name": _text(given, "name", where),
        "input": _text(given, "input", where),
        "status": "completed",
    }


def _function_call_output(given: Mapping[str, Any], where: str, new_id: NewId) -> Json:
    return {"type": "function_call_output", **_output(given, where, "fco", new_id)}


def _custom_tool_call_output(given: Mapping[str, Any], where: str, new_id: NewId) -> Json:
    return {"type": "custom_tool_call_output", **_output(given, where, "ctco", new_id)}


def _output(given: Mapping[str, Any], where: str, kind: str, new_id: NewId) -> Json:
    output = given.get("output")
    if not isinstance(output, str):
        output = _input_parts(output, f"{where}.output")
    return {
        "id": _id(given, where, kind, new_id),
        "call_id": _text(given, "call_id", where),
        "output": output,
        "status": "completed",
    }


def _reasoning(given: Mapping[str, Any], where: str, new_id: NewId) -> Json:
    lists = {}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        texts = _texts(given.get(name) or [], f"{where}.{name}")
        lists[name] = [{"type": kind, "text": text} for text in texts]
    if given.get("encrypted_content") and not any(lists.values()):
        field = f"{where}.encrypted_content"
        raise _wrong(field, "cannot be read by this server; remove the item")
    return {"type": "reasoning", "id": _id(given, where, "rs", new_id), **lists}


def _reference(given: Mapping[str, Any], where: str, new_id: NewId) -> Json:
    return {"type": "item_reference", "id": _text(given, "id", where)}


READERS: dict[str, Callable[[Mapping[str, Any], str, NewId], Json]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_call_output,
    "custom_tool_call": _custom_tool_call,
    "custom_tool_call_output": _custom_tool_call_output,
    "reasoning": _reasoning,
    "item_reference": _reference,
}


def _input_parts(parts: object, where: str) -> list[Json]:
    """Return the parts of a content that may contain texts and images."""
    found: list[Json] = []
    for part, path in _parts(parts, where):
        if read_part(part, path) is None:
            found.append({"type": "input_text", "text": _part_text(part, path, "input_image")})
            continue
        given = part["image_url"]
        inner = given if isinstance(given, Mapping) else {"url": given}
        detail = inner.get("detail", part.get("detail")) or "auto"
        found.append({"type": "input_image", "image_url": inner["url"], "detail": detail})
    return found


def _texts(parts: object, where: str) -> list[str]:
    """Return the texts of a content that may contain only text parts."""
    return [_part_text(part, path, "output_text") for part, path in _parts(parts, where)]


def _parts(parts: object, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return the parts, each with its path for error messages."""
    if not isinstance(parts, list):
        raise _wrong(where, f"must be a text or a list of parts, got {shown(parts)}")
    for index, part in enumerate(parts):
        if not isinstance(part, Mapping):
            raise _wrong(f"{where}[{index}]", f"must be an object, got {shown(part)}")
    return [(part, f"{where}[{index}]") for index, part in enumerate(parts)]


def _part_text(part: Mapping[str, Any], where: str, other: str) -> str:
    """Return the text of a part. other: a further allowed type, for the error message."""
    kind = part.get("type")
    if kind != "refusal" and kind not in TEXTS:
        raise _wrong(f"{where}.type", f"must be input_text or {other}, got {shown(kind)}")
    return _text(part, "refusal" if kind == "refusal" else "text", where)


def _id(given: Mapping[str, Any], where: str, kind: str, new_id: NewId) -> str:
    """Return an item's own id, or a new one."""
    found = given.get("id")
    if not found:
        return new_id(kind)
    if not isinstance(found, str) or len(found) > MAX_ID_CHARS:
        rule = f"must be a text of at most {MAX_ID_CHARS} characters, got {shown(found)}"
        raise _wrong(f"{where}.id", rule)
    return found


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    found = given.get(name)
    if not isinstance(found, str):
        raise _wrong(f"{where}.{name}", f"is required, a text, got {shown(found)}")
    return found


def _wrong(where: str, rule: str) -> ApiError:
    return bad_request(f"{where} {rule}.", where)
