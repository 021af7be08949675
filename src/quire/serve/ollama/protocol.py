"""Fields of Ollama's bodies, and of their `options`.

`as_chat.py` translates them to fields of a chat or a completion. Streams are on by default, as in
Ollama's API.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from quire.serve.bodies import schemas
from quire.serve.bodies.foreign_fields import NO_SUCH_SAMPLER
from quire.serve.bodies.length_limit import LengthLimit
from quire.serve.bodies.open_body import (
    GRAMMAR,
    MODEL,
    PROMPT,
    RESPONSE,
    Ignored,
    OpenBody,
    at_most,
    becomes,
    unsupported,
)
from quire.serve.bodies.pooling_protocol import Texts
from quire.serve.bodies.protocol import (
    MAX_SCHEMA_FIELDS,
    Int32,
    Label,
    Messages,
    Natural,
    Penalty,
    Positive,
    SchedulingFields,
    StopStrings,
    Tools,
)

MAX_OPTIONS = 64
MAX_IMAGES = 256
NO_ROPE = "the model's own files set it; remove it"
NO_GO_TEMPLATES = "it is a template of Go; start the server with --chat-template FILE, in Jinja"
NO_CONTEXT = "send the earlier messages to /api/chat"
NO_IMAGES = "this server generates text only; remove it"

OutputFormat = Annotated[
    Literal["json", ""] | dict[str, Any],
    at_most(MAX_SCHEMA_FIELDS),
    WithJsonSchema(
        schemas.one_of(
            {"enum": ["json", ""]}, {"type": "object", "maxProperties": MAX_SCHEMA_FIELDS}
        )
    ),
]
Think = bool | Literal["low", "medium", "high"]
Images = Annotated[
    list[str], Field(max_length=MAX_IMAGES, fail_fast=True), at_most(MAX_IMAGES)
]  # base64


class Options(BaseModel):
    """Ollama's options. `as_chat.options_of` checks the unknown ones."""

    model_config = ConfigDict(extra="allow")

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # -1: any
    stop: StopStrings | None = None
    num_predict: Int32 | None = becomes("SamplingParams.max_tokens")  # below 1: what fits
    repeat_penalty: Penalty | None = becomes("SamplingParams.repetition_penalty")
    # Penalties apply to the whole text (-1) or not at all (0).
    repeat_last_n: Int32 | None = becomes("SamplingParams.repetition_penalty")

    num_ctx: Positive | None = becomes("SamplingParams.max_tokens")  # with the prompt

    # The server decides about its memory and its threads, and never shortens a prompt.
    num_keep: Ignored
    num_batch: Ignored
    num_gpu: Ignored
    main_gpu: Ignored
    num_thread: Ignored
    numa: Ignored
    low_vram: Ignored
    f16_kv: Ignored
    vocab_only: Ignored
    use_mmap: Ignored
    use_mlock: Ignored
    logits_all: Ignored
    embedding_only: Ignored
    penalize_newline: Ignored  # without effect in Ollama, too
    mirostat_tau: Ignored
    mirostat_eta: Ignored
    mirostat: Any = unsupported(NO_SUCH_SAMPLER, 0)
    tfs_z: Any = unsupported(NO_SUCH_SAMPLER, 1, 0)
    typical_p: Any = unsupported(NO_SUCH_SAMPLER, 1, 0)
    rope_frequency_base: Any = unsupported(NO_ROPE, 0)
    rope_frequency_scale: Any = unsupported(NO_ROPE, 0)


class OllamaBody(OpenBody, SchedulingFields):
    """The fields of all bodies that the engine computes."""

    options: Annotated[Options, at_most(MAX_OPTIONS)] | None = becomes("SamplingParams")
    keep_alive: Ignored

    @property
    def limit(self) -> LengthLimit | None:
        """Limit of the prompt and its answer together, if the options set one."""
        if self.options is None or self.options.num_ctx is None:
            return None
        return LengthLimit(self.options.num_ctx, "num_ctx")


class AnsweredBody(OllamaBody):
    """The fields of chats and generations."""

    stream: bool | None = becomes(RESPONSE, default=True)
    format: OutputFormat | None = becomes(GRAMMAR)
    think: Think | None = becomes(PROMPT)
    logprobs: bool | None = None
    top_logprobs: Natural | None = becomes("SamplingParams.logprobs")
    truncate: Ignored  # a prompt that is too long is refused
    shift: Ignored

    @property
    def streams(self) -> bool:
        return self.stream is not False


class ChatBody(AnsweredBody):
    """A body of /api/chat. The renderer checks messages and tools."""

    messages: Messages | None = becomes(PROMPT)
    tools: Tools | None = becomes(PROMPT)


class GenerateBody(AnsweredBody):
    """A body of /api/generate."""

    prompt: str | None = becomes(PROMPT)
    suffix: str | None = becomes(PROMPT)
    images: Images | None = becomes(PROMPT)
    system: str | None = becomes(PROMPT)
    raw: bool | None = becomes(PROMPT)  # without the chat template
    template: Any = unsupported(NO_GO_TEMPLATES, "")
    context: Any = unsupported(NO_CONTEXT, [])
    width: Any = unsupported(NO_IMAGES, 0)
    height: Any = unsupported(NO_IMAGES, 0)
    steps: Any = unsupported(NO_IMAGES, 0)


class EmbedBody(OllamaBody):
    """A body of /api/embed."""

    input: Texts = becomes(PROMPT)
    truncate: bool | None = becomes(PROMPT, default=True)  # cut inputs that are too long
    dimensions: Positive | None = becomes(RESPONSE)


class EmbeddingsBody(OllamaBody):
    """A body of /api/embeddings, the older endpoint."""

    prompt: str | None = becomes(PROMPT)


class NamedBody(OpenBody):
    """A body that names a model, in the newer or the older field."""

    model: Label | None = becomes(MODEL)
    name: Label | None = becomes(MODEL)

    @property
    def requested(self) -> str | None:
        return self.model or self.name


class ShowBody(NamedBody):
    """A body of /api/show."""

    verbose: Ignored
    system: Ignored
    template: Ignored
    options: Ignored


class PullBody(NamedBody):
    """A body of /api/pull."""

    stream: bool | None = becomes(RESPONSE, default=True)
    insecure: Ignored
    username: Ignored
    password: Ignored
