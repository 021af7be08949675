"""What clients may send to /v1/responses: OpenAI's fields, and those of sampling that vLLM adds.

Names and limits that chat completions have too are theirs (`protocol.py`).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from quire.serve.api.bodies.open_body import unsupported
from quire.serve.api.bodies.protocol import (
    MAX_FORMAT_FIELDS,
    MAX_MESSAGES,
    MAX_SALT_CHARS,
    NOT_HERE,
    Format,
    Ignored,
    Int32,
    KeepSeconds,
    Label,
    SampledBody,
    ScheduledBody,
    TemplateKwargs,
    Tools,
    at_most,
)
from quire.serve.media.parts import DETAILS

MAX_INCLUDES = 32
MAX_METADATA = 16
MAX_METADATA_NAME_CHARS = 64
MAX_METADATA_CHARS = 512

_PART_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "input_text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "input_image"},
                "image_url": {"type": "string", "minLength": 1},
                "detail": {"enum": [*DETAILS, None]},
            },
            "required": ["type", "image_url"],
        },
    ]
}
_MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}]},
    },
    "required": ["role", "content"],
}
_ITEM_SCHEMA = {
    "type": "object",
    "description": "a call of a tool, its output, reasoning, or the name of a stored item",
    "properties": {
        "type": {
            "enum": [
                "function_call", "function_call_output", "custom_tool_call",
                "custom_tool_call_output", "reasoning", "item_reference",
            ]
        }
    },
    "required": ["type"],
}  # fmt: skip
_INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE_SCHEMA},
        {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _ITEM_SCHEMA},
    ]
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["auto", "none", "required", None]},
        {
            "type": "object",
            "maxProperties": MAX_FORMAT_FIELDS,
            "properties": {
                "type": {"enum": ["function", "custom", "allowed_tools"]},
                "name": {"type": "string"},
            },
            "required": ["type"],
        },
    ]
}
_FORMAT_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_FORMAT_FIELDS,
    "properties": {
        "type": {"enum": ["text", "json_object", "json_schema"]},
        "name": {"type": "string"},
        "schema": {"type": "object"},
        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["type"],
}

Input = Annotated[Any, at_most(MAX_MESSAGES), WithJsonSchema(_INPUT_SCHEMA)]
Include = Annotated[
    list[Label], Field(max_length=MAX_INCLUDES, fail_fast=True), at_most(MAX_INCLUDES)
]
MetadataName = Annotated[str, Field(max_length=MAX_METADATA_NAME_CHARS)]
MetadataText = Annotated[str, Field(max_length=MAX_METADATA_CHARS)]
Metadata = Annotated[
    dict[MetadataName, MetadataText], Field(max_length=MAX_METADATA), at_most(MAX_METADATA)
]


class TextConfig(BaseModel):
    """What form the text of an answer has."""

    format: Annotated[Format, WithJsonSchema(_FORMAT_SCHEMA)] | None = None
    verbosity: Label | None = None


class ReasoningConfig(BaseModel):
    """effort: told to the chat template, as chat completions do. There are no summaries: the
    reasoning itself is shown."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    summary: Label | None = None
    generate_summary: Label | None = None


class ResponsesRequest(SampledBody, ScheduledBody):
    """input: a text or items, checked where they are read. tools and tool_choice: those of
    functions and of custom tools."""

    input: Input = None
    instructions: str | None = None
    previous_response_id: Label | None = None
    stream: bool | None = None
    stream_options: Ignored
    background: bool | None = None
    keep_s: KeepSeconds | None = None
    store: bool | None = None
    include: Include | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = None

    # How tokens are chosen, and when the answer ends
    max_output_tokens: Int32 | None = None
    max_tool_calls: Int32 | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    # What the answer must be
    tools: Tools | None = None
    tool_choice: Annotated[Any, at_most(MAX_FORMAT_FIELDS), WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None
    text: Annotated[TextConfig, at_most(MAX_FORMAT_FIELDS)] | None = None
    reasoning: Annotated[ReasoningConfig, at_most(MAX_FORMAT_FIELDS)] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None

    # Labels and hints of clients
    safety_identifier: Label | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    prompt_cache_retention: Ignored
    prompt_cache_options: Ignored
    service_tier: Ignored
    request_id: Ignored

    conversation: Any = unsupported("use previous_response_id, or send the items before")
    prompt: Any = unsupported("there are no stored prompts here; send instructions and input")
    context_management: Any = unsupported("use truncation='auto', or shorten the input", [])
    moderation: Any = unsupported(NOT_HERE)
    previous_input_messages: Any = unsupported("send them as items of input", [])
    enable_response_messages: Any = unsupported(NOT_HERE, False)
    kv_transfer_params: Any = unsupported(NOT_HERE, {})
