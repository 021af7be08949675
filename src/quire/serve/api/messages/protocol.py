"""What clients may send to /v1/messages and /v1/messages/count_tokens: Anthropic's fields, and some
of quire's own.

Unknown fields are left out and told, or refused (`open_body`). Messages, system blocks and tools
are plain objects here, which `conversation` and `as_chat` check.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from quire.serve.api.bodies.open_body import OpenBody, unsupported
from quire.serve.api.bodies.protocol import (
    INT32,
    MAX_FORMAT_FIELDS,
    MAX_MESSAGES,
    MAX_SALT_CHARS,
    MAX_SCHEMA_FIELDS,
    MAX_TOOLS,
    NOT_HERE,
    Ignored,
    Int32,
    Label,
    Objects,
    StopStrings,
    TemplateKwargs,
    at_most,
)

MAX_BLOCKS = 1024  # of a system prompt

Json = dict[str, Any]


def _object(required: tuple[str, ...] = (), **properties: Any) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


_TEXT = {"type": "string"}
_TEXT_BLOCK = _object(("type", "text"), type={"const": "text"}, text=_TEXT)
_BLOCKS = {"type": "array", "items": _TEXT_BLOCK, "minItems": 1}
_TEXTS = {"anyOf": [_TEXT, _BLOCKS]}
_SOURCE = {
    "anyOf": [
        _object(
            ("type", "media_type", "data"), type={"const": "base64"},
            media_type={"type": "string", "minLength": 1}, data={"type": "string", "minLength": 1},
        ),
        _object(("type", "url"), type={"const": "url"}, url={"type": "string", "minLength": 1}),
    ]
}  # fmt: skip
_IMAGE_BLOCK = _object(("type", "source"), type={"const": "image"}, source=_SOURCE)
_RESULTS = {"type": "array", "items": {"anyOf": [_TEXT_BLOCK, _IMAGE_BLOCK]}, "minItems": 1}
_USER_BLOCK = {
    "anyOf": [
        _TEXT_BLOCK,
        _IMAGE_BLOCK,
        _object(
            ("type", "tool_use_id"), type={"const": "tool_result"}, tool_use_id=_TEXT,
            content={"anyOf": [_TEXT, _RESULTS]}, is_error={"type": "boolean"},
        ),
    ]
}  # fmt: skip
_ASSISTANT_BLOCK = {
    "anyOf": [
        _TEXT_BLOCK,
        _object(
            ("type", "id", "name", "input"), type={"const": "tool_use"}, id=_TEXT,
            name={"type": "string", "minLength": 1}, input={"type": "object"},
        ),
        _object(
            ("type", "thinking"), type={"const": "thinking"}, thinking=_TEXT, signature=_TEXT
        ),
        _object(("type", "data"), type={"const": "redacted_thinking"}, data=_TEXT),
    ]
}  # fmt: skip


def _message(role: str, block: Json) -> Json:
    blocks = {"type": "array", "items": block, "minItems": 1}
    return _object(("role", "content"), role={"const": role}, content={"anyOf": [_TEXT, blocks]})


_MESSAGE_SCHEMA = {
    "anyOf": [
        _message("user", _USER_BLOCK),
        _message("assistant", _ASSISTANT_BLOCK),
        _message("system", _TEXT_BLOCK),
    ]
}
_TOOL_SCHEMA = _object(
    ("name", "input_schema"), name={"type": "string", "minLength": 1}, description=_TEXT,
    input_schema={"type": "object"}, type={"enum": ["custom", None]}, strict={"type": "boolean"},
)  # fmt: skip

Conversation = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE_SCHEMA)]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    at_most(MAX_MESSAGES),
]
_SYSTEM = {"anyOf": [_TEXT, _BLOCKS | {"maxItems": MAX_BLOCKS}]}
System = Annotated[str | Objects, at_most(MAX_BLOCKS), WithJsonSchema(_SYSTEM)]
CustomTools = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_TOOL_SCHEMA)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    at_most(MAX_TOOLS),
]
Schema = Annotated[dict[str, Any], at_most(MAX_SCHEMA_FIELDS)]


class Thinking(BaseModel):
    """budget_tokens: how many tokens of reasoning there may be. display: `omitted` leaves its text
    out of the answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=INT32)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class ToolChoice(BaseModel):
    """name: of the tool to call, with the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Format(BaseModel):
    """The form of an answer's text."""

    type: Literal["json_schema"]
    json_schema: Annotated[Schema, Field(alias="schema")]


class OutputConfig(BaseModel):
    """effort: how much to reason, for templates that know about it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[Format, at_most(MAX_FORMAT_FIELDS)] | None = None


class Metadata(BaseModel):
    """user_id: whom the request is for; without API keys, a tenant."""

    user_id: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None


class Conversing(OpenBody):
    """The fields that say what the prompt is, which both endpoints have."""

    model: Label | None = None
    messages: Conversation
    system: System | None = None
    tools: CustomTools | None = None
    tool_choice: Annotated[ToolChoice, at_most(MAX_FORMAT_FIELDS)] | None = None
    thinking: Annotated[Thinking, at_most(MAX_FORMAT_FIELDS)] | None = None
    output_config: Annotated[OutputConfig, at_most(MAX_FORMAT_FIELDS)] | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    cache_control: Ignored
    speed: Ignored
    user_profile_id: Ignored
    output_format: Any = unsupported("use output_config.format")
    mcp_servers: Any = unsupported("the server calls no tools by itself; remove it", [])


class CountTokensRequest(Conversing):
    """A conversation whose tokens are counted."""


class MessagesRequest(Conversing):
    """max_tokens: how long the answer may be at most; 0 only computes the prompt, for the cache."""

    max_tokens: Annotated[int, Field(ge=0, lt=INT32)]
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    metadata: Annotated[Metadata, at_most(MAX_FORMAT_FIELDS)] | None = None

    min_p: float | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    seed: int | None = None
    priority: Int32 | None = None
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    service_tier: Ignored
    inference_geo: Ignored
    diagnostics: Ignored
    container: Any = unsupported(NOT_HERE)
