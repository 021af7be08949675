"""Fields of the bodies of llama.cpp's server, which `as_completion.py` translates."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from quire.serve.bodies import schemas
from quire.serve.bodies.foreign_fields import FOREIGN
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
from quire.serve.bodies.pooling_protocol import Texts
from quire.serve.bodies.protocol import (
    MAX_LOGIT_BIAS,
    MAX_PROMPTS,
    Breakers,
    ConversationFields,
    Int32,
    JsonSchema,
    Label,
    Loras,
    ModelField,
    Natural,
    Objects,
    Penalty,
    SchedulingFields,
    SomeMessages,
    StopStrings,
    Tools,
)

MAX_EXTRA = 256
MAX_NAMES = 64

_BIAS = schemas.one_of(
    {"type": "object", "maxProperties": MAX_LOGIT_BIAS},
    {"type": "array", "maxItems": MAX_LOGIT_BIAS},
)
Bias = Annotated[Any, at_most(MAX_LOGIT_BIAS), WithJsonSchema(_BIAS)]
Names = Annotated[list[Label], Field(max_length=MAX_NAMES, fail_fast=True), at_most(MAX_NAMES)]


def _foreign(name: str) -> Any:
    """Declare a field that is refused in other bodies, too, by the same rule."""
    return unsupported(FOREIGN[name].advice, *FOREIGN[name].values)


class NativeBody(OpenBody, SchedulingFields):
    """The fields of /completion and /infill."""

    temperature: float | None = None
    top_k: Int32 | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # -1: any
    stop: StopStrings | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int32 | None = None
    dry_penalty_last_n: Int32 | None = None
    dry_sequence_breakers: Breakers | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    repeat_penalty: Penalty | None = becomes("SamplingParams.repetition_penalty")
    # Penalties apply to the whole text (-1) or not at all (0).
    repeat_last_n: Int32 | None = becomes("SamplingParams.repetition_penalty")
    n_predict: Int32 | None = becomes("SamplingParams.max_tokens")  # below 0: what fits
    logit_bias: Bias = becomes("SamplingParams.logit_bias")
    ignore_eos: bool | None = becomes("Request.eos_token_ids")
    n_probs: Natural | None = becomes("SamplingParams.logprobs")
    samplers: Names | None = becomes("SamplingParams.temperature")  # others are switched off
    grammar: str | None = becomes(GRAMMAR)  # GBNF
    json_schema: JsonSchema | None = becomes(GRAMMAR)

    stream: bool | None = becomes(RESPONSE)
    return_tokens: bool | None = becomes(RESPONSE)
    response_fields: Names | None = becomes(RESPONSE)
    # Milliseconds from the first token until an answer with a line break ends; 0 and below: none
    t_max_predict_ms: Int32 | None = becomes(RESPONSE)

    cache_prompt: Ignored
    id_slot: Ignored
    n_keep: Ignored
    n_discard: Ignored
    t_max_prompt_ms: Ignored
    timings_per_token: Ignored
    return_progress: Ignored
    mirostat_tau: Ignored
    mirostat_eta: Ignored
    dynatemp_exponent: Ignored
    min_keep: Any = _foreign("min_keep")
    mirostat: Any = _foreign("mirostat")
    typical_p: Any = _foreign("typical_p")
    top_n_sigma: Any = _foreign("top_n_sigma")
    dynatemp_range: Any = _foreign("dynatemp_range")
    lora: Loras | None = becomes("Request.adapter_id")
    post_sampling_probs: Any = unsupported("use n_probs, before sampling", False)
    n_cmpl: Any = unsupported("use n of /v1/completions", 1)


class CompletionBody(NativeBody):
    """A body of /completion and /completions. `as_completion.prompt_of` reads the prompt."""

    prompt: Annotated[
        Any, at_most(1 << 20), WithJsonSchema(schemas.prompts_schema(MAX_PROMPTS))
    ] = becomes(PROMPT)
    n_indent: Any = _foreign("n_indent")


class InfillBody(NativeBody):
    """A body of /infill. input_extra: other files, as {"filename", "text"}."""

    input_prefix: str | None = becomes(PROMPT)
    input_suffix: str | None = becomes(PROMPT)
    input_extra: Annotated[Objects, Field(max_length=MAX_EXTRA), at_most(MAX_EXTRA)] | None = (
        becomes(PROMPT)
    )
    prompt: str | None = becomes(PROMPT)  # follows the fill-in tokens
    n_indent: Natural | None = becomes(RESPONSE)  # cut before a line with fewer blanks


class TemplateBody(OpenBody, ModelField, ConversationFields):
    """A body of /apply-template."""

    messages: SomeMessages = becomes(PROMPT, default=...)
    tools: Tools | None = becomes(PROMPT)
    reasoning_format: Ignored


class NativeEmbeddingBody(OpenBody, SchedulingFields):
    """A body of /embedding."""

    content: Texts = becomes(PROMPT)
    input: Texts = becomes(PROMPT)
    # -1: not normalised; 2: to unit length
    embd_normalize: Literal[-1, 2] | None = becomes(RESPONSE)
    image_data: Any = unsupported("this model accepts text only; remove it", [])
