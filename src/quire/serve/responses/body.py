"""Fields of /v1/responses: OpenAI's fields, and vLLM's sampling fields."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

from quire.serve.bodies import schemas
from quire.serve.bodies.open_body import (
    GRAMMAR,
    PROMPT,
    RESPONSE,
    Ignored,
    at_most,
    becomes,
    unsupported,
)
from quire.serve.bodies.protocol import (
    MAX_FORMAT_FIELDS,
    MAX_MESSAGES,
    CacheRetention,
    ChatFields,
    Effort,
    Format,
    Int32,
    KeepSeconds,
    Label,
    Natural,
    SampledBody,
    ScheduledBody,
    Tenant,
)
from quire.serve.bodies.schemas import SOME_TEXT, TEXT, list_of, object_of, one_of
from quire.serve.media.parts import DETAILS

MAX_INCLUDES = 32
MAX_METADATA = 16
MAX_METADATA_NAME_CHARS = 64
MAX_METADATA_CHARS = 512

_PART_SCHEMA = one_of(
    object_of("type", "text", type={"const": "input_text"}, text=TEXT),
    object_of(
        "type", "image_url",
        type={"const": "input_image"}, image_url=SOME_TEXT, detail={"enum": [*DETAILS, None]},
    ),
)  # fmt: skip
_MESSAGE_SCHEMA = object_of(
    "role", "content",
    type={"const": "message"}, role={"enum": ["user", "assistant", "system", "developer"]},
    content=one_of(TEXT, list_of(_PART_SCHEMA)),
)  # fmt: skip
_ITEM_TYPES = [
    "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "reasoning", "item_reference",
]  # fmt: skip
_ITEM_SCHEMA = object_of("type", type={"enum": _ITEM_TYPES}) | {
    "description": "a call of a tool, its output, reasoning, or the name of a stored item"
}
_INPUT_SCHEMA = one_of(
    SOME_TEXT,
    *(list_of(each, minItems=1, maxItems=MAX_MESSAGES) for each in (_MESSAGE_SCHEMA, _ITEM_SCHEMA)),
)
_CHOICE_SCHEMA = schemas.choice_schema(
    MAX_FORMAT_FIELDS,
    object_of("type", type={"enum": ["function", "custom", "allowed_tools"]}, name=TEXT),
)
_FORMAT_SCHEMA = object_of(
    "type",
    type={"enum": ["text", "json_object", "json_schema"]}, name=TEXT, schema={"type": "object"},
    strict=schemas.FLAG,
) | {"maxProperties": MAX_FORMAT_FIELDS}  # fmt: skip

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
    """The format of a response's text."""

    format: Annotated[Format, WithJsonSchema(_FORMAT_SCHEMA)] | None = None
    verbosity: Label | None = None


class ReasoningConfig(BaseModel):
    """How much to reason. There are no summaries, because the reasoning itself is shown."""

    effort: Effort | None = None
    summary: Label | None = None
    generate_summary: Label | None = None


class ResponsesRequest(SampledBody, ScheduledBody, ChatFields):
    """A body of /v1/responses. Input items are validated when they are read (`read_items`)."""

    input: Input = becomes(PROMPT)
    instructions: str | None = becomes(PROMPT)
    previous_response_id: Label | None = becomes(PROMPT)
    stream: bool | None = becomes(RESPONSE)
    stream_options: Ignored
    background: bool | None = becomes(RESPONSE)
    keep_s: KeepSeconds | None = becomes("Request.keep_s")
    store: bool | None = becomes(RESPONSE)
    include: Include | None = becomes("SamplingParams.logprobs")
    metadata: Metadata | None = becomes(RESPONSE)
    truncation: Literal["auto", "disabled"] | None = becomes(PROMPT)

    # Sampling, and the end of the response
    max_output_tokens: Int32 | None = becomes("SamplingParams.max_tokens")
    max_tool_calls: Int32 | None = becomes(RESPONSE)
    top_logprobs: Natural | None = becomes("SamplingParams.logprobs")

    # The format of the response
    tool_choice: Annotated[Any, at_most(MAX_FORMAT_FIELDS), WithJsonSchema(_CHOICE_SCHEMA)] = (
        becomes(GRAMMAR)
    )
    text: Annotated[TextConfig, at_most(MAX_FORMAT_FIELDS)] | None = becomes(GRAMMAR)
    reasoning: Annotated[ReasoningConfig, at_most(MAX_FORMAT_FIELDS)] | None = becomes(PROMPT)

    # Labels and hints of clients
    safety_identifier: Label | None = becomes(RESPONSE)
    prompt_cache_key: Tenant | None = becomes("Request.keep_s", RESPONSE)
    prompt_cache_retention: CacheRetention | None = becomes("Request.keep_s")
    prompt_cache_options: Ignored
    service_tier: Ignored

    conversation: Any = unsupported("use previous_response_id, or send the items before")
    prompt: Any = unsupported("there are no stored prompts here; send instructions and input")
    context_management: Any = unsupported("use truncation='auto', or shorten the input", [])
    moderation: Any = unsupported("quire has no moderation model; use hooks of the server")
    max_tokens: Any = unsupported("use max_output_tokens")
    max_completion_tokens: Any = unsupported("use max_output_tokens")
    reasoning_effort: Any = unsupported("use reasoning.effort")
    truncate_prompt_tokens: Any = unsupported("use truncation='auto', which keeps what fits")
    previous_input_messages: Any = unsupported("send them as items of input", [])
    enable_response_messages: Any = unsupported("read the items of output", False)
    kv_transfer_params: Any = unsupported("use it in /v1/chat/completions", {})
