"""What clients may send to /v1/completions and /v1/chat/completions: OpenAI's fields and vLLM's.

A field that does not exist is left out and told, or refused (`open_body`). Fields that mean nothing
here are taken and ignored; fields that cannot be served are taken at their neutral value only
(`unsupported_fields`). `None` is "not given": then the model's own default counts. Sizes are capped
here, values are checked by SamplingParams, token ids by the client.

A list or an object is measured before its items are looked at (`at_most`), and the first wrong item
of a list ends it: pydantic alone looks at all and makes an error of each.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from quire.base.requests.repetition import MOST_PATTERN_SIZE, RepetitionDetectionParams
from quire.base.requests.sampling_params import MOST_NAMED_TOKENS
from quire.base.requests.validation import MAX_KEEP_S
from quire.serve.api.bodies.open_body import OpenBody, unsupported
from quire.serve.media.parts import DETAILS

MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_BREAKERS = 64
MAX_PROCESSORS = 8
MAX_PROCESSOR_KWARGS = 64
MAX_WORD_CHARS = 512
MAX_PROMPTS = 256
MAX_N = 128
MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_DOCUMENTS = 1024
MAX_TEMPLATE_KWARGS = 256
MAX_STREAM_OPTIONS = 16
MAX_SALT_CHARS = 1024
MAX_LABEL_CHARS = 256
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 19
MAX_NAME_CHARS = 256  # of an object's fields
MAX_CHOICES = 1 << 14
MAX_FORMAT_FIELDS = 16
MAX_TRANSFER_FIELDS = 64
MAX_SCHEMA_FIELDS = 256  # of a JSON schema, on its first level
INT32 = 2**31
NOT_HERE = "is not supported; remove it"
NO_MEDIA_OPTIONS = "the model's own settings decide how images are read; remove it"

_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXT = {"type": "string", "minLength": 1}
ONE_PROMPT_SCHEMA = {"anyOf": [_TEXT, _TOKEN_IDS]}


def prompts_schema(most: int) -> dict[str, Any]:
    """Describe a field of one prompt, or of several, each a text or token ids."""
    several = {"type": "array", "minItems": 1, "maxItems": most}
    return {
        "anyOf": [_TEXT, several | {"items": _TEXT}, _TOKEN_IDS, several | {"items": _TOKEN_IDS}]
    }


# Of a conversation with a model that has a vision tower.
IMAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": _TEXT, "detail": {"enum": [*DETAILS, None]}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_SCHEMA = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}
_MESSAGE_SCHEMA = {
    "type": "object",
    "properties": {
        "role": {
            "type": "string",
            "minLength": 1,
            "description": "such as system, user, assistant or tool",
        },
        "content": {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            {
                                "type": "object",
                                "properties": {
                                    "type": {"const": "text"},
                                    "text": {"type": "string"},
                                },
                                "required": ["type", "text"],
                            },
                            IMAGE_SCHEMA,
                        ]
                    },
                },
                {"type": "null"},
            ]
        },
    },
    "required": ["role"],
    "anyOf": [{"required": ["content"]}, {"required": ["tool_calls"]}],
}
_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["auto", "none", "required", None]},
        {
            "type": "object",
            "maxProperties": MAX_FORMAT_FIELDS,
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                },
            },
            "required": ["type", "function"],
        },
    ]
}


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def at_most(most: int) -> BeforeValidator:
    """Refuse a list or an object of more than `most` items before one of them is looked at, and an
    object with a name of more than MAX_NAME_CHARS."""

    def checked(value: object) -> object:
        if isinstance(value, list | Mapping) and len(value) > most:
            raise PydanticCustomError("too_long", "too long", {"max_length": most})
        if isinstance(value, Mapping) and any(len(name) > MAX_NAME_CHARS for name in value):
            raise PydanticCustomError("names_too_long", "too long", {"max_length": MAX_NAME_CHARS})
        return value

    return BeforeValidator(checked)


Ignored = Annotated[Any, Field(default=None, description="accepted and ignored")]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS, fail_fast=True),
    at_most(MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(_STOP_SCHEMA),
]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
Breakers = Annotated[
    list[StopString], Field(max_length=MAX_BREAKERS, fail_fast=True), at_most(MAX_BREAKERS)
]


BadWords = Annotated[
    list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True), at_most(MAX_BAD_WORDS)
]
LogitBias = Annotated[dict[int, float], Field(max_length=MAX_LOGIT_BIAS), at_most(MAX_LOGIT_BIAS)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Message = Annotated[dict[str, Any], WithJsonSchema(_MESSAGE_SCHEMA)]
Messages = Annotated[
    list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)
]
Tools = Annotated[Objects, Field(max_length=MAX_TOOLS), at_most(MAX_TOOLS)]
Documents = Annotated[Objects, Field(max_length=MAX_DOCUMENTS), at_most(MAX_DOCUMENTS)]
TemplateKwargs = Annotated[
    dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS), at_most(MAX_TEMPLATE_KWARGS)
]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
AllowedTokens = Annotated[
    TokenIds, Field(max_length=MAX_ALLOWED_TOKENS), at_most(MAX_ALLOWED_TOKENS)
]
StopTokens = Annotated[TokenIds, Field(max_length=MAX_STOP_TOKENS), at_most(MAX_STOP_TOKENS)]
NamedTokens = Annotated[TokenIds, Field(max_length=MOST_NAMED_TOKENS), at_most(MOST_NAMED_TOKENS)]
Int32 = Annotated[int, Field(ge=-INT32, lt=INT32)]
Count = Annotated[int, Field(ge=1, le=MAX_N)]
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
KeepSeconds = Annotated[float, Field(ge=0, le=MAX_KEEP_S)]


class NamedProcessor(BaseModel):
    """A logits processor that a package brings."""

    model_config = ConfigDict(extra="forbid")

    name: Label
    kwargs: Annotated[dict[str, Any], at_most(MAX_PROCESSOR_KWARGS)] | None = None


class RepetitionSizes(BaseModel):
    """The fields of `RepetitionDetectionParams`, with their meaning."""

    model_config = ConfigDict(extra="forbid")

    max_pattern_size: Annotated[int, Field(ge=0, le=MOST_PATTERN_SIZE)] = 0
    min_pattern_size: Annotated[int, Field(ge=0, le=MOST_PATTERN_SIZE)] = 0
    min_count: Annotated[int, Field(ge=0, lt=INT32)] = 0


RepetitionDetection = Annotated[
    RepetitionSizes,
    at_most(MAX_FORMAT_FIELDS),
    AfterValidator(lambda asked: RepetitionDetectionParams(**asked.model_dump())),
]


_PROCESSOR_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "kwargs": {"type": "object"}},
            "required": ["name"],
            "additionalProperties": False,
        },
    ]
}
Processor = Annotated[
    NamedProcessor,
    BeforeValidator(lambda asked: {"name": asked} if isinstance(asked, str) else asked),
    AfterValidator(lambda asked: asked.model_dump(exclude_none=True)),
    WithJsonSchema(_PROCESSOR_SCHEMA),
]
Processors = Annotated[
    list[Processor],
    Field(max_length=MAX_PROCESSORS, fail_fast=True),
    at_most(MAX_PROCESSORS),
]


_SCHEMA = {"type": "object", "additionalProperties": True}
_RESPONSE_FORMAT_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "maxProperties": MAX_FORMAT_FIELDS,
            "properties": {"type": {"enum": ["text", "json_object"]}},
            "required": ["type"],
        },
        {
            "type": "object",
            "maxProperties": MAX_FORMAT_FIELDS,
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "minLength": 1},
                        "schema": _SCHEMA,
                        "strict": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                        "description": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    },
                    "required": ["name", "schema"],
                },
            },
            "required": ["type", "json_schema"],
        },
        {
            "type": "object",
            "maxProperties": MAX_FORMAT_FIELDS,
            "properties": {
                "type": {"const": "structural_tag"},
                "format": _SCHEMA,
                "structures": {"type": "array", "items": _SCHEMA},
                "triggers": {"type": "array", "items": {"type": "string", "minLength": 1}},
            },
            "required": ["type"],
        },
    ]
}
_TEXT_OR_OBJECT = {"anyOf": [{"type": "string"}, _SCHEMA]}
_STRUCTURED_SCHEMA = {
    "type": "object",
    "maxProperties": MAX_FORMAT_FIELDS,
    "description": "exactly one of the first six, or an empty object",
    "properties": {
        "json": _TEXT_OR_OBJECT,
        "regex": {"type": "string"},
        "choice": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
        "grammar": {"type": "string"},
        "json_object": {"type": "boolean"},
        "structural_tag": _TEXT_OR_OBJECT,
        "disable_any_whitespace": {"type": "boolean"},
        "disable_additional_properties": {"type": "boolean"},
        "whitespace_pattern": {"type": "string"},
    },
    "additionalProperties": False,
}
Format = Annotated[
    dict[str, Any], at_most(MAX_FORMAT_FIELDS), WithJsonSchema(_RESPONSE_FORMAT_SCHEMA)
]
StructuredOutputs = Annotated[
    dict[str, Any], at_most(MAX_FORMAT_FIELDS), WithJsonSchema(_STRUCTURED_SCHEMA)
]
JsonSchema = Annotated[
    str | dict[str, Any],
    at_most(MAX_SCHEMA_FIELDS),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "object", "maxProperties": MAX_SCHEMA_FIELDS}]}
    ),
]
TransferParams = Annotated[
    dict[str, Any], Field(max_length=MAX_TRANSFER_FIELDS), at_most(MAX_TRANSFER_FIELDS)
]
Choice = Annotated[str, Field(min_length=1)]
Choices = Annotated[
    list[Choice], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), at_most(MAX_CHOICES)
]


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the usage. continuous_usage_stats: in every chunk, too. What
    else there may be is ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored


class ScheduledBody(OpenBody):
    """The fields of all bodies that the engine works on: for whom, and when."""

    model: Label | None = None
    priority: Int32 | None = None
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    user: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None


class ServedBody(ScheduledBody):
    """Besides, what of the prompt."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=INT32)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: Label | None = None


class SampledBody(OpenBody):
    """How tokens are chosen, when an answer ends, and what it must be."""

    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    seed: int | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerationRequest(SampledBody, ServedBody):
    """The fields that both endpoints have. keep_s: how long a request is held when it has ended."""

    stream: bool | None = None
    stream_options: Annotated[StreamOptions, at_most(MAX_STREAM_OPTIONS)] | None = None

    keep_s: KeepSeconds | None = None

    # How tokens are chosen, and when a text ends
    n: Count | None = None
    max_tokens: Int32 | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int32 | None = None
    dry_penalty_last_n: Int32 | None = None
    dry_sequence_breakers: Breakers | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logits_processors: Processors | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None

    use_beam_search: bool | None = None
    beam_width: Count | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    # What is shown
    echo: bool | None = None
    prompt_logprobs: Int32 | None = None
    logprob_token_ids: NamedTokens | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: Annotated[int, Field(ge=1, lt=INT32)] | None = None

    # Labels and hints of clients
    session_id: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored
    prompt_cache_retention: Ignored

    # What the answer must be (`structured.py`)
    response_format: Format | None = None
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None  # llama.cpp's; GBNF, or Lark
    json_schema: JsonSchema | None = None  # llama.cpp's and SGLang's
    regex: str | None = None  # SGLang's, as the next one
    ebnf: str | None = None
    guided_decoding_backend: Ignored

    return_token_offsets: Any = unsupported(NOT_HERE, False)
    thinking_token_budget: Any = unsupported("use max_tokens to limit the answer", -1)
    watermarking: Any = unsupported(NOT_HERE, False)
    kv_transfer_params: TransferParams | None = None
    ec_transfer_params: Any = unsupported(NOT_HERE, {})
    vllm_xargs: Any = unsupported(NOT_HERE, {})

    @property
    def num_named(self) -> int:
        """How many tokens are named whose logprobs are to be shown at each position."""
        return len(self.logprob_token_ids or ())

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """logprobs: how many candidates are shown per token, beside the chosen one. best_of: how many
    continuations are made, of which the best n are shown. suffix: what follows the continuation."""

    prompt: Annotated[Any, WithJsonSchema(prompts_schema(MAX_PROMPTS))] = None
    suffix: str | None = None
    logprobs: Int32 | None = None

    best_of: Count | None = None

    prompt_embeds: Any = unsupported("send the prompt as text or token ids", [])


class ChatCompletionRequest(GenerationRequest):
    """messages and tools: plain objects, checked where they are rendered."""

    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, lt=INT32)] | None = None

    tools: Tools | None = None
    tool_choice: Annotated[Any, at_most(MAX_FORMAT_FIELDS), WithJsonSchema(_TOOL_CHOICE_SCHEMA)] = (
        None
    )
    parallel_tool_calls: bool | None = None
    documents: Documents | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, lt=INT32)] | None = None
    verbosity: Ignored
    prediction: Ignored

    functions: Any = unsupported("use tools, which replaced it", [])
    function_call: Any = unsupported("use tools and tool_choice, which replaced it", "none", "auto")
    modalities: Any = unsupported("this model generates text only; use ['text']", ["text"], [])
    audio: Any = unsupported("this model generates text only; remove it")
    web_search_options: Any = unsupported("the server does not search the web; remove it")
    media_io_kwargs: Any = unsupported(NO_MEDIA_OPTIONS, {})
    mm_processor_kwargs: Any = unsupported(NO_MEDIA_OPTIONS, {})
    return_prompt_text: Any = unsupported("use /tokenize, or return_token_ids", False)
