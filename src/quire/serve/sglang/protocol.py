"""Fields of /generate of SGLang's server, and of its `sampling_params`.

`as_completion.py` translates them to fields of a completion.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, WithJsonSchema

from quire.serve.bodies import schemas
from quire.serve.bodies.foreign_fields import FOREIGN, IMAGES
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
    MAX_PROMPTS,
    Count,
    Int32,
    JsonSchema,
    LogitBias,
    Natural,
    Penalty,
    Positive,
    Salt,
    SchedulingFields,
    StopStrings,
    StopTokens,
)

MAX_SAMPLING_FIELDS = 64
NO_STATES = "quire returns no hidden states; remove it"
NO_DISAGGREGATION = "use kv_transfer_params of /v1/completions"
ONE_NAMED = "use logprob_token_ids of /v1/completions"

_TEXTS = schemas.one_of(
    schemas.SOME_TEXT, schemas.list_of(schemas.SOME_TEXT, minItems=1, maxItems=MAX_PROMPTS)
)
_IDS = schemas.one_of(
    schemas.TOKEN_IDS, schemas.list_of(schemas.TOKEN_IDS, minItems=1, maxItems=MAX_PROMPTS)
)


def _foreign(name: str) -> Any:
    """Declare a field that is refused in other bodies, too, by the same rule."""
    return unsupported(FOREIGN[name].advice, *FOREIGN[name].values)


class Sampling(BaseModel):
    """SGLang's sampling_params. `checks.py` checks the unknown ones."""

    model_config = ConfigDict(extra="allow")

    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    n: Count | None = None
    stop: StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Positive | None = None
    ignore_eos: bool | None = becomes("Request.eos_token_ids")
    max_new_tokens: Natural | None = becomes("SamplingParams.max_tokens")  # None: 128
    min_new_tokens: Int32 | None = becomes("SamplingParams.min_tokens")
    no_stop_trim: bool | None = becomes("SamplingParams.include_stop_str_in_output")
    sampling_seed: int | None = becomes("SamplingParams.seed")
    json_schema: JsonSchema | None = becomes(GRAMMAR)
    regex: str | None = becomes(GRAMMAR)
    ebnf: str | None = becomes(GRAMMAR)
    structural_tag: JsonSchema | None = becomes(GRAMMAR)
    max_tokens: Any = unsupported("use max_new_tokens")
    min_tokens: Any = unsupported("use min_new_tokens", 0)
    seed: Any = unsupported("use sampling_seed")
    stop_regex: Any = _foreign("stop_regex")
    custom_params: Any = _foreign("custom_params")


class TextsBody(OpenBody, SchedulingFields):
    """A body of /generate: one prompt or several, as texts or token ids."""

    text: Annotated[Any, WithJsonSchema(_TEXTS)] = becomes(PROMPT)
    input_ids: Annotated[Any, WithJsonSchema(_IDS)] = becomes(PROMPT)
    sampling_params: Annotated[Sampling, at_most(MAX_SAMPLING_FIELDS)] | None = becomes(
        "SamplingParams"
    )
    stream: bool | None = becomes("SamplingParams.output_kind", RESPONSE)
    return_logprob: bool | None = becomes("SamplingParams.logprobs")
    top_logprobs_num: Natural | None = becomes("SamplingParams.logprobs")
    logprob_start_len: Int32 | None = becomes("SamplingParams.prompt_logprobs")  # -1: none
    return_text_in_logprobs: bool | None = becomes(RESPONSE)
    extra_key: Salt | None = becomes("Request.cache_salt")  # appended to cache_salt
    data_parallel_rank: Natural | None = becomes("Request.core_id")

    rid: Ignored  # responses have ids of the server
    log_metrics: Ignored
    modalities: Ignored
    background: Ignored
    # text-generation-inference's names, whose route has the same path
    inputs: Any = unsupported("use text, or prompt of /v1/completions")
    parameters: Any = unsupported("use sampling_params, or the fields of /v1/completions", {})
    token_ids_logprob: Any = unsupported(ONE_NAMED, [])
    input_embeds: Any = unsupported("send text, or input_ids", [])
    image_data: Any = unsupported(IMAGES + " of /v1/chat/completions", [], "")
    video_data: Any = unsupported("send videos in messages of /v1/chat/completions", [], "")
    audio_data: Any = unsupported("this model reads text only; remove it", [], "")
    session_params: Any = _foreign("session_params")
    lora_path: Any = _foreign("lora_path")
    custom_logit_processor: Any = _foreign("custom_logit_processor")
    return_hidden_states: Any = unsupported(NO_STATES, False)
    bootstrap_host: Any = unsupported(NO_DISAGGREGATION, "")
    bootstrap_port: Any = unsupported(NO_DISAGGREGATION)
    bootstrap_room: Any = unsupported(NO_DISAGGREGATION)
