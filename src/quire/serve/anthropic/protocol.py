"""Fields of /v1/messages and /v1/messages/count_tokens: Anthropic's fields and some of quire's own.

Messages, system blocks and tools are plain objects here; `conversation` and `as_chat` check them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from quire.serve.bodies.open_body import (
    GRAMMAR,
    PROMPT,
    RESPONSE,
    Ignored,
    OpenBody,
    at_most,
    becomes,
    unsupported,
)
from quire.serve.bodies.protocol import (
    MAX_FORMAT_FIELDS,
    MAX_MESSAGES,
    MAX_SCHEMA_FIELDS,
    MAX_TOOLS,
    ModelField,
    Natural,
    Objects,
    Positive,
    SamplingFields,
    SchedulingFields,
    StopStrings,
    Tenant,
    VariableFields,
)
from quire.serve.bodies.schemas import NULL, SOME_TEXT, TEXT, TEXT_PART, list_of, object_of, one_of

MAX_BLOCKS = 1024  # blocks of a system prompt
TTLS = ("5m", "1h")  # lifetimes of marked conversations in the cache; the first is the default

Json = dict[str, Any]

_BLOCKS = list_of(TEXT_PART, minItems=1)
_SOURCE = one_of(
    object_of(
        "type", "media_type", "data",
        type={"const": "base64"}, media_type=SOME_TEXT, data=SOME_TEXT,
    ),
    object_of("type", "url", type={"const": "url"}, url=SOME_TEXT),
)  # fmt: skip
_IMAGE_BLOCK = object_of("type", "source", type={"const": "image"}, source=_SOURCE)
_RESULTS = list_of(one_of(TEXT_PART, _IMAGE_BLOCK), minItems=1)
_USER_BLOCK = one_of(
    TEXT_PART,
    _IMAGE_BLOCK,
    object_of(
        "type", "tool_use_id", type={"const": "tool_result"}, tool_use_id=TEXT,
        content=one_of(TEXT, _RESULTS), is_error={"type": "boolean"},
    ),
)  # fmt: skip
_ASSISTANT_BLOCK = one_of(
    TEXT_PART,
    object_of(
        "type", "id", "name", "input",
        type={"const": "tool_use"}, id=TEXT, name=SOME_TEXT, input={"type": "object"},
    ),
    object_of("type", "thinking", type={"const": "thinking"}, thinking=TEXT, signature=TEXT),
    object_of("type", "data", type={"const": "redacted_thinking"}, data=TEXT),
)  # fmt: skip


def _message(role: str, block: Json) -> Json:
    content = one_of(TEXT, list_of(block, minItems=1))
    return object_of("role", "content", role={"const": role}, content=content)


_MESSAGE_SCHEMA = one_of(
    _message("user", _USER_BLOCK),
    _message("assistant", _ASSISTANT_BLOCK),
    _message("system", TEXT_PART),
)
_TOOL_SCHEMA = object_of(
    "name", "input_schema", name=SOME_TEXT, description=TEXT, input_schema={"type": "object"},
    type={"enum": ["custom", None]}, strict={"type": "boolean"},
)  # fmt: skip

Conversation = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE_SCHEMA)]],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    at_most(MAX_MESSAGES),
]
_SYSTEM = one_of(TEXT, _BLOCKS | {"maxItems": MAX_BLOCKS})
System = Annotated[str | Objects, at_most(MAX_BLOCKS), WithJsonSchema(_SYSTEM)]
CustomTools = Annotated[
    list[Annotated[dict[str, Any], WithJsonSchema(_TOOL_SCHEMA)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    at_most(MAX_TOOLS),
]
_MARK = object_of("type", type={"const": "ephemeral"}, ttl={"enum": list(TTLS)}) | {
    "maxProperties": MAX_FORMAT_FIELDS
}
Mark = Annotated[Any, at_most(MAX_FORMAT_FIELDS), WithJsonSchema(one_of(_MARK, NULL))]
Schema = Annotated[dict[str, Any], at_most(MAX_SCHEMA_FIELDS)]


class Thinking(BaseModel):
    """Reasoning options: whether the model reasons, how much, and whether its text is shown."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None  # maximum number of reasoning tokens
    display: Literal["summarized", "omitted"] | None = None  # omitted: reason, without the text


class ToolChoice(BaseModel):
    """Tool choice: whether the response calls a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # name of the tool to call, for type `tool`
    disable_parallel_tool_use: bool | None = None


class Format(BaseModel):
    """Constraint on a response's text: a JSON schema."""

    type: Literal["json_schema"]
    json_schema: Annotated[Schema, Field(alias="schema")]


class OutputConfig(BaseModel):
    """Output options: the reasoning effort, for templates with that variable, and the format."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Annotated[Format, at_most(MAX_FORMAT_FIELDS)] | None = None


class Metadata(BaseModel):
    """Labels of a request. user_id: the tenant, on a server without keys."""

    user_id: Tenant | None = None


class Conversing(OpenBody, ModelField, VariableFields):
    """The fields of the prompt, which both endpoints have."""

    messages: Conversation = becomes(PROMPT, default=...)
    system: System | None = becomes(PROMPT)
    tools: CustomTools | None = becomes(PROMPT)
    tool_choice: Annotated[ToolChoice, at_most(MAX_FORMAT_FIELDS)] | None = becomes(GRAMMAR)
    thinking: Annotated[Thinking, at_most(MAX_FORMAT_FIELDS)] | None = becomes(PROMPT)
    output_config: Annotated[OutputConfig, at_most(MAX_FORMAT_FIELDS)] | None = becomes(PROMPT)

    speed: Ignored
    user_profile_id: Ignored
    output_format: Any = unsupported("use output_config.format")
    mcp_servers: Any = unsupported("the server calls no tools by itself; remove it", [])


class CountTokensRequest(Conversing):
    """A conversation whose tokens are counted."""

    # It removes the tools with --exclude-tools-when-tool-choice-none alone.
    tool_choice: Annotated[ToolChoice, at_most(MAX_FORMAT_FIELDS)] | None = becomes()
    cache_control: Ignored


class MessagesRequest(Conversing, SchedulingFields, SamplingFields):
    """A conversation that the model continues."""

    max_tokens: Natural = becomes("SamplingParams.max_tokens", default=...)  # 0: prefill only
    stream: bool | None = becomes(RESPONSE)
    stop_sequences: StopStrings | None = becomes("SamplingParams.stop")
    # As in blocks, for the whole conversation (`cache_control.py`)
    cache_control: Mark = becomes("Request.keep_s")
    metadata: Annotated[Metadata, at_most(MAX_FORMAT_FIELDS)] | None = becomes("Request.tenant")

    service_tier: Ignored
    inference_geo: Ignored
    diagnostics: Ignored
    container: Any = unsupported("quire runs no code; run the tools yourself")
