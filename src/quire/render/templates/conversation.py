"""Check the messages of a conversation and convert them to the form that a chat template takes.

A message is {"role": ..., "content": text or list of parts, ...}. A part is a text,
{"type": "text", "text": ...}, or an image or a video ({"type": "image"}). Other fields (name,
tool_calls, tool_call_id, reasoning_content and fields of the template's own) are passed on as plain
data, unless they are null. The caller's objects are not changed.

Arguments of past calls are JSON objects or text. Clients send back the model's text, so it may be
truncated or invalid JSON. Neither is an error: such a conversation can continue.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.base.errors import RequestError
from quire.render.templates.template_forms import TemplateForms

INVALID = "INVALID_JSON"  # key for arguments that contain no JSON object
_CLOSING = {"{": "}", "[": "]"}
# A string of JSON, with its end if it has one, or a bracket or comma.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\],]', re.DOTALL)
# Text that may follow the last whole value of truncated JSON: a name, or part of a word or number.
_CUT_OFF = re.compile(
    r'\s*,?\s*(?:"[^"\\]*(?:\\.[^"\\]*)*(?:"\s*(?::\s*)?)?)?'
    r"(?:tr?u?|fa?l?s?|nu?l?|[-+.eE0-9]+)?",
    re.DOTALL,
)
# A truncated escape, or the first half of a surrogate pair, and the backslashes before it.
_HALF_ESCAPE = re.compile(
    r"(?<!\\)((?:\\\\)*)(?:\\u[dD][89abAB][0-9a-fA-F]{2})?(?:\\u[0-9a-fA-F]{0,3})?$"
)


def arguments_object(given: object) -> dict[str, Any]:
    """Return arguments as an object.

    Truncated JSON yields its complete members. Text without an object is stored under INVALID."""
    if isinstance(given, dict):
        return given
    text = arguments_text(given)
    for candidate in (text, *_ended(text)):
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {INVALID: text}
    return {INVALID: text}


def arguments_text(given: object) -> str:
    """Return arguments as text. Text stays unchanged; empty arguments become an empty object."""
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return "{}" if text.strip() in ("", "null") else text


def _ended(text: str) -> list[str]:
    """Close the open strings and brackets of truncated JSON, in up to two ways.

    The first candidate keeps all text; it is invalid if the text ends within a name or a word. The
    second ends after the last whole value. Return no candidates if the text is not truncated."""
    open_: list[str] = []  # closing brackets of the objects and lists that are open
    whole = 0  # end of the last whole value
    last = ""
    for token in _TOKEN.finditer(text):
        word = token[0]
        if word.startswith('"'):
            if not token[1]:
                text, last = _HALF_ESCAPE.sub(r"\1", text[: token.end()]), '"'
            continue
        whole = token.start() if word == "," else token.end()
        if word in _CLOSING:
            open_.append(_CLOSING[word])
        elif word != "," and open_:
            open_.pop()
            if not open_:
                return []
    closing = "".join(reversed(open_))
    ended = [text + last + closing]
    return [*ended, text[:whole] + closing] if _CUT_OFF.fullmatch(text, whole) else ended


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
IMAGE_PARTS = ("image_url", "input_image")
REASONING = ("reasoning_content", "reasoning", "thinking")
MAX_DEPTH = 64
MEDIA_PARTS = ({"type": "image"}, {"type": "video"})  # as transformers' templates expect them
Message = dict[str, Any]
Media = dict[str, str]


def prepare_messages(
    messages: object, forms: TemplateForms, content_format: str = "auto"
) -> list[Message]:
    """Return checked copies of the messages. Raises RequestError that names the invalid message.

    forms: the forms that the template takes. content_format: see `ChatOptions`.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError("a conversation must be a non-empty list of messages.")
    checked = [_checked(message, index) for index, message in enumerate(messages)]
    out = _with_known_roles(checked, forms)
    for message in out:
        _set_tool_calls(message, forms)
        _set_content(message, forms, content_format)
        _set_reasoning(message)
    return out


def check_messages(messages: Sequence[object]) -> None:
    """Raise RequestError that names the first invalid message."""
    for index, message in enumerate(messages):
        _checked(message, index)


def prepare_tools(tools: object) -> list[Message] | None:
    """Return checked copies of tools ({"type": "function", "function": {...}}); None if empty."""
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
    """Return the function of a tool's description. Raises RequestError with the name `where` if the
    function has no name."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RequestError(f"{where} needs a function with a name.", where)
    found: Mapping[str, Any] = function
    return found


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy in JSON's types only, so that a template can reach no other objects."""
    if depth > MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {MAX_DEPTH} levels deep.", where)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_data(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, str):  # a subclass, such as a member of an enum; likewise below
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
    """Return the error for an invalid message, with the message as the error's field."""
    return RequestError(f"messages[{index}] {rule}.", f"messages[{index}]")


def _wrong_part(index: int, rule: str) -> RequestError:
    """Return the error for an invalid part of a message, without a field."""
    return RequestError(f"messages[{index}] {rule}.")


def _checked(message: object, index: int) -> Message:
    """Return a copy of a message whose content is a text or a list of texts and media parts."""
    if not isinstance(message, Mapping):
        raise _wrong(index, f"must be an object with a role, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(index, f"needs a role such as user or assistant, got {role!r}")
    plain: Message = plain_data(dict(message), f"messages[{index}]")
    plain = {name: value for name, value in plain.items() if value is not None}
    plain["content"] = _texts(plain, index)
    _check_tool_calls(plain, index)
    return plain


def _texts(message: Message, index: int) -> str | list[str | Media]:
    """Return a message's content; an empty text for an assistant's message without content."""
    content = message.get("content")
    if content is None and message["role"] != "assistant":
        raise _wrong(index, f"needs a content, which only an assistant's message ({message['role']}"
                            " is the role here) may lack")  # fmt: skip
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return [part if part in MEDIA_PARTS else _part_text(part, index) for part in content]
    kind = type(content).__name__
    raise _wrong_part(
        index, f"has a content of type {kind}; it must be a text or a list of text parts"
    )


def _with_known_roles(messages: list[Message], forms: TemplateForms) -> list[Message]:
    """Replace the role `developer` by `system`, unless the template knows the former.

    A developer message next to a system message is merged with it, because many templates take only
    one of the two."""
    found: list[Message] = []
    for message in messages:
        roles = {message["role"], found[-1]["role"]} if found else set()
        if "developer" in roles and roles <= {"system", "developer"}:
            before = found[-1]
            texts = [_joined(before["content"]), _joined(message["content"])]
            found[-1] = before | {"content": "\n\n".join(texts)}
        else:
            found.append(message)
    for message in found:
        if message["role"] == "developer":
            message["role"] = forms.developer_role(message is found[0])
    return found


def _joined(content: str | list[str | Media]) -> str:
    if isinstance(content, str):
        return content
    texts = [each for each in content if isinstance(each, str)]
    if len(texts) < len(content):
        raise RequestError(
            "this chat template takes only text in the message that has an image; send the image in"
            " a user's message, or use another chat_template."
        )
    return "\n".join(texts)


def _set_content(message: Message, forms: TemplateForms, content_format: str) -> None:
    """Set a message's content to parts or a text, whichever the template takes."""
    role, content = message["role"], message["content"]
    if not content and "tool_calls" in message:
        message["content"] = forms.call_content
        return
    is_auto = content_format == "auto"
    has_parts = isinstance(content, list) and not (is_auto and not forms.takes_parts(role))
    if content_format == "string" or not has_parts:
        content = _joined(content)
        must_be_part = content and content_format != "string" and forms.needs_part(role)
        content = [content] if must_be_part else content
    if isinstance(content, list):
        content = [each if isinstance(each, dict) else {"type": "text", "text": each}
                   for each in content]  # fmt: skip
    message["content"] = content


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise _wrong_part(index, f"has a part of type {type(part).__name__}; it must be an object")
    kind = part.get("type", "text")
    if kind not in TEXT_PARTS:
        images = "" if kind in IMAGE_PARTS else ", and images as image_url parts"
        rule = f"has a part of type {kind!r}, which is not supported here; send text parts{images}"
        raise _wrong_part(index, rule)
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise _wrong_part(index, "has a text part without a text")
    return text


def _check_tool_calls(message: Message, index: int) -> None:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise _wrong_part(
            index, f"has tool_calls of type {type(calls).__name__}; it must be a list"
        )
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong_part(index, "has a tool call without a function name")


def _set_tool_calls(message: Message, forms: TemplateForms) -> None:
    """Convert the arguments of calls to an object or to JSON text, as the template takes them."""
    calls = message.get("tool_calls")
    if not calls:
        message.pop("tool_calls", None)  # templates test only whether the field exists
        return
    formed = arguments_text if forms.needs_argument_text else arguments_object
    for call in calls:
        function = call.get("function", call)
        function["arguments"] = formed(function.get("arguments"))


def _set_reasoning(message: Message) -> None:
    """Copy the reasoning to the fields that templates read; clients use three names for it."""
    given = next((message[key] for key in REASONING if message.get(key) is not None), None)
    if given is not None:
        message["reasoning_content"] = given
        message.setdefault("thinking", given)
