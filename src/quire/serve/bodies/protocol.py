"""Fields of /v1/completions and /v1/chat/completions, and the fields that other bodies share.

Each field declares what becomes of it (`open_body.py`). `None` means "not given", and then the
model's default applies. Sizes are limited here. `SamplingParams` checks values, and the client
checks token ids.

`at_most` measures a list or an object before its items are read, and validation of a list ends at
the first wrong item. pydantic alone would read all items and make an error for each.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, WithJsonSchema

from quire.base.requests.repetition import MAX_PATTERN_SIZE, RepetitionDetectionParams
from quire.base.requests.retention import MAX_KEEP_S
from quire.base.requests.sampling_params import MAX_NAMED_TOKENS
from quire.serve.bodies import schemas
from quire.serve.bodies.foreign_fields import NO_WATERMARKS
from quire.serve.bodies.open_body import (
    GRAMMAR,
    MODEL,
    PROMPT,
    RESPONSE,
    Ignored,
    OpenBody,
    StrictBody,
    at_most,
    becomes,
    unsupported,
)

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
MAX_LORAS = 64
MAX_SCALE = 1e6  # of an adapter
MAX_STOP_TOKENS = 1024
MAX_ALLOWED_TOKENS = 1 << 19
MAX_CHOICES = 1 << 14
MAX_FORMAT_FIELDS = 16
MAX_TRANSFER_FIELDS = 64
MAX_SCHEMA_FIELDS = 256  # top-level fields of a JSON schema
INT32 = 2**31
NO_OFFSETS = "quire returns no offsets of tokens; use return_token_ids and /detokenize"
OF_PLUGINS = "only connectors and plug-ins of vLLM read it; remove it"
NO_MEDIA_OPTIONS = "the model's own settings decide how images are read; remove it"


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_STOP = schemas.SOME_TEXT | {"maxLength": MAX_STOP_CHARS}
StopStrings = Annotated[
    list[StopString],
    Field(max_length=MAX_STOPS, fail_fast=True),
    at_most(MAX_STOPS),
    BeforeValidator(_as_list),
    WithJsonSchema(schemas.one_of(_STOP, schemas.list_of(_STOP, maxItems=MAX_STOPS))),
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
Message = Annotated[dict[str, Any], WithJsonSchema(schemas.MESSAGE)]
Messages = Annotated[
    list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)
]
SomeMessages = Annotated[Messages, Field(min_length=1)]
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
NamedTokens = Annotated[TokenIds, Field(max_length=MAX_NAMED_TOKENS), at_most(MAX_NAMED_TOKENS)]
Int32 = Annotated[int, Field(ge=-INT32, lt=INT32)]
Natural = Annotated[int, Field(ge=0, lt=INT32)]
Positive = Annotated[int, Field(ge=1, lt=INT32)]
OrUnlimited = Annotated[int, Field(ge=-1, lt=INT32)]  # -1 means no limit
Count = Annotated[int, Field(ge=1, le=MAX_N)]
Label = Annotated[str, Field(max_length=MAX_LABEL_CHARS)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
Effort = Annotated[str, Field(max_length=32)]
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)]
CacheRetention = Literal["in_memory", "in-memory", "24h"]
Tenant = Annotated[str, Field(max_length=MAX_SALT_CHARS)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
KeepSeconds = Annotated[float, Field(ge=0, le=MAX_KEEP_S)]
Scale = Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=0.01, le=100)]
ToolChoice = Annotated[
    Any,
    at_most(MAX_FORMAT_FIELDS),
    WithJsonSchema(schemas.choice_schema(MAX_FORMAT_FIELDS, schemas.NAMED_FUNCTION)),
]


class NamedProcessor(StrictBody):
    """A logits processor of an installed package."""

    name: Label
    kwargs: Annotated[dict[str, Any], at_most(MAX_PROCESSOR_KWARGS)] | None = None


class RepetitionSizes(StrictBody):
    """The fields of `RepetitionDetectionParams`, with the same meaning."""

    max_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)] = 0
    min_pattern_size: Annotated[int, Field(ge=0, le=MAX_PATTERN_SIZE)] = 0
    min_count: Natural = 0


RepetitionDetection = Annotated[
    RepetitionSizes,
    at_most(MAX_FORMAT_FIELDS),
    AfterValidator(lambda sizes: RepetitionDetectionParams(**sizes.model_dump())),
]
Processor = Annotated[
    NamedProcessor,
    BeforeValidator(lambda given: {"name": given} if isinstance(given, str) else given),
    AfterValidator(lambda processor: processor.model_dump(exclude_none=True)),
    WithJsonSchema(schemas.PROCESSOR),
]
Processors = Annotated[
    list[Processor], Field(max_length=MAX_PROCESSORS, fail_fast=True), at_most(MAX_PROCESSORS)
]
Format = Annotated[
    dict[str, Any],
    at_most(MAX_FORMAT_FIELDS),
    WithJsonSchema(schemas.response_format_schema(MAX_FORMAT_FIELDS)),
]
StructuredOutputs = Annotated[
    dict[str, Any],
    at_most(MAX_FORMAT_FIELDS),
    WithJsonSchema(schemas.structured_outputs_schema(MAX_FORMAT_FIELDS, MAX_CHOICES)),
]
JsonSchema = Annotated[
    str | dict[str, Any],
    at_most(MAX_SCHEMA_FIELDS),
    WithJsonSchema(
        schemas.one_of(schemas.TEXT, {"type": "object", "maxProperties": MAX_SCHEMA_FIELDS})
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
    """Options of a stream: when it reports usage. Other options are ignored."""

    include_usage: bool | None = becomes(RESPONSE)  # in a final chunk
    continuous_usage_stats: bool | None = becomes(RESPONSE)  # also in every other chunk
    include_obfuscation: Ignored


# Fields that several bodies share


class ModelField(StrictBody):
    """Name of the model that answers; the first model if absent."""

    model: Label | None = becomes(MODEL)


class SchedulingFields(ModelField):
    """Priority and deadline of a request, and the salt that separates cached blocks."""

    priority: Int32 | None = becomes("Request.priority")
    timeout_s: Seconds | None = becomes("Request.timeout_s")
    cache_salt: Salt | None = becomes("Request.cache_salt")


class LoraScale(StrictBody):
    """The scale of an adapter, under llama.cpp's names. id: as in GET /lora-adapters."""

    id: Natural = becomes("Request.adapter_id", default=...)
    scale: Scale = becomes("Request.adapter_id", default=...)


Loras = Annotated[list[LoraScale], Field(max_length=MAX_LORAS, fail_fast=True), at_most(MAX_LORAS)]


class SamplingFields(StrictBody):
    """Sampling parameters that most bodies share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: Penalty | None = None
    seed: int | None = None


class VariableFields(StrictBody):
    """Variables for the chat template."""

    chat_template_kwargs: TemplateKwargs | None = becomes(PROMPT)


class TemplateFields(VariableFields):
    """The chat template, as a name or a text, and its variables."""

    chat_template: str | None = becomes(PROMPT)


class ConversationFields(TemplateFields):
    """Options for the end of a rendered conversation."""

    add_generation_prompt: bool | None = becomes(PROMPT)
    continue_final_message: bool | None = becomes(PROMPT)


class ChatFields(TemplateFields):
    """Tool and reasoning options of chats."""

    tools: Tools | None = becomes(PROMPT)
    tool_choice: ToolChoice = becomes(GRAMMAR)
    parallel_tool_calls: bool | None = becomes(GRAMMAR)
    include_reasoning: bool | None = becomes(RESPONSE)
    thinking_token_budget: OrUnlimited | None = becomes(GRAMMAR)


class ScheduledBody(OpenBody, SchedulingFields):
    """The fields of all OpenAI bodies that the engine computes."""

    user: Tenant | None = becomes("Request.tenant")
    request_id: Ignored


class ServedBody(ScheduledBody):
    """The fields of bodies with one prompt or several."""

    add_special_tokens: bool | None = becomes(PROMPT)
    truncate_prompt_tokens: OrUnlimited | None = becomes(PROMPT)
    truncation_side: Literal["left", "right"] | None = becomes(PROMPT)


class SampledBody(OpenBody, SamplingFields):
    """Sampling parameters, the ends of a response, and its constraint."""

    min_tokens: Int32 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokens | None = None
    bad_words: BadWords | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = becomes("Request.eos_token_ids")
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputs | None = becomes(GRAMMAR)


class GenerationRequest(SampledBody, ServedBody):
    """The fields of completions and chats."""

    stream: bool | None = becomes("SamplingParams.output_kind", RESPONSE)
    stream_options: Annotated[StreamOptions, at_most(MAX_STREAM_OPTIONS)] | None = becomes(RESPONSE)
    keep_s: KeepSeconds | None = becomes("Request.keep_s")

    # Sampling, and the ends of a text
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

    # Contents of the response
    echo: bool | None = becomes(RESPONSE)
    prompt_logprobs: Int32 | None = None
    logprob_token_ids: NamedTokens | None = None
    return_token_ids: bool | None = becomes(RESPONSE)
    return_tokens_as_token_ids: bool | None = becomes(RESPONSE)
    stream_interval: Positive | None = None

    # Labels and hints of clients
    session_id: Ignored
    metadata: Ignored
    store: Ignored
    service_tier: Ignored
    safety_identifier: Ignored

    # Caching hints (`pipeline/retention.py`)
    prompt_cache_key: Tenant | None = becomes("Request.keep_s")
    prompt_cache_retention: CacheRetention | None = becomes("Request.keep_s")

    # Constraints on the response (`constraints.py`)
    response_format: Format | None = becomes(GRAMMAR)
    guided_json: JsonSchema | None = becomes(GRAMMAR)
    guided_regex: str | None = becomes(GRAMMAR)
    guided_choice: Choices | None = becomes(GRAMMAR)
    guided_grammar: str | None = becomes(GRAMMAR)
    guided_whitespace_pattern: str | None = becomes(GRAMMAR)
    grammar: str | None = becomes(GRAMMAR)  # llama.cpp's field: GBNF, or Lark
    json_schema: JsonSchema | None = becomes(GRAMMAR)  # field of llama.cpp and SGLang
    regex: str | None = becomes(GRAMMAR)  # SGLang's field
    ebnf: str | None = becomes(GRAMMAR)  # SGLang's field
    guided_decoding_backend: Ignored

    lora: Loras | None = becomes("Request.adapter_id")  # llama.cpp's field

    return_token_offsets: Any = unsupported(NO_OFFSETS, False)
    watermarking: Any = unsupported(NO_WATERMARKS, False)
    kv_transfer_params: TransferParams | None = becomes("Request.kv_transfer")
    ec_transfer_params: Any = unsupported(OF_PLUGINS, {})
    vllm_xargs: Any = unsupported(OF_PLUGINS, {})


class CompletionRequest(GenerationRequest):
    """A body of /v1/completions."""

    prompt: Annotated[Any, WithJsonSchema(schemas.prompts_schema(MAX_PROMPTS))] = becomes(PROMPT)
    suffix: str | None = becomes(PROMPT)  # follows the continuation
    logprobs: Int32 | None = None
    best_of: Count | None = None  # number of computed continuations; the best n are returned

    thinking_token_budget: Any = unsupported("use max_tokens to limit the answer", -1)
    prompt_embeds: Any = unsupported("send the prompt as text or token ids", [])


class ChatCompletionRequest(GenerationRequest, ConversationFields, ChatFields):
    """A body of /v1/chat/completions. The renderer checks messages and tools."""

    messages: SomeMessages = becomes(PROMPT, default=...)
    max_completion_tokens: Int32 | None = becomes("SamplingParams.max_tokens")
    logprobs: bool | None = None
    top_logprobs: Natural | None = becomes("SamplingParams.logprobs")

    documents: Documents | None = becomes(PROMPT)
    reasoning_effort: Effort | None = becomes(PROMPT)
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
