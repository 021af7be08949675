"""Bodies of trainers: vLLM's /inference/v1/generate, and the routes of TRL's server.

`as_requests.py` translates them to bodies of completions and chats.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

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
    MAX_STREAM_OPTIONS,
    Count,
    Int32,
    NamedTokens,
    Natural,
    Penalty,
    Positive,
    SampledBody,
    SchedulingFields,
    SomeMessages,
    StreamOptions,
    TemplateKwargs,
    TokenIds,
    Tools,
    TransferParams,
)

MAX_SAMPLING_FIELDS = 64
NO_EXTRA_ARGS = "quire reads no extra arguments; kv_transfer_params is a field of the body"
NO_FEATURES = "send images in messages of /v1/chat/completions"

Prompts = Annotated[
    list[str] | list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), at_most(MAX_PROMPTS)
]
Conversations = Annotated[
    list[SomeMessages], Field(min_length=1, max_length=MAX_PROMPTS), at_most(MAX_PROMPTS)
]
Sequences = Annotated[
    list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), at_most(MAX_PROMPTS)
]
Lengths = Annotated[list[Natural], Field(max_length=MAX_PROMPTS), at_most(MAX_PROMPTS)]


class VllmSampling(SampledBody):
    """vLLM's SamplingParams as an object. `check_inner` checks the unknown fields."""

    model_config = ConfigDict(extra="allow")

    n: Count | None = None
    max_tokens: Int32 | None = None
    logprobs: Int32 | None = None
    prompt_logprobs: Int32 | None = None
    logprob_token_ids: NamedTokens | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream_interval: Positive | None = None

    detokenize: Ignored
    flat_logprobs: Ignored
    output_kind: Ignored
    skip_reading_prefix_cache: Ignored
    extra_args: Any = unsupported(NO_EXTRA_ARGS, {})


SamplingObject = Annotated[VllmSampling, at_most(MAX_SAMPLING_FIELDS)]


class TokensBody(OpenBody, SchedulingFields):
    """A body of /inference/v1/generate: one prompt as token ids."""

    token_ids: Annotated[TokenIds, Field(min_length=1)] = becomes(PROMPT, default=...)
    sampling_params: SamplingObject | None = becomes("SamplingParams")
    stream: bool | None = becomes("SamplingParams.output_kind", RESPONSE)
    stream_options: Annotated[StreamOptions, at_most(MAX_STREAM_OPTIONS)] | None = becomes(RESPONSE)
    kv_transfer_params: TransferParams | None = becomes("Request.kv_transfer")

    request_id: Ignored  # responses have ids of the server
    assistant_tokens_mask: Ignored
    token_offsets: Ignored
    features: Any = unsupported(NO_FEATURES, {})
    ec_transfer_params: Any = unsupported(NO_FEATURES, {})


class RolloutFields(OpenBody):
    """Sampling parameters of TRL's bodies. An absent one has TRL's default, not the model's."""

    n: Count | None = None
    repetition_penalty: Penalty | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    max_tokens: Int32 | None = None
    logprobs: Int32 | None = None
    structured_outputs_regex: str | None = becomes(GRAMMAR)
    generation_kwargs: SamplingObject | None = becomes("SamplingParams")


class RolloutBody(RolloutFields):
    """A body of TRL's /generate/: texts, or prompts as token ids."""

    prompts: Prompts = becomes(PROMPT, default=...)
    images: Any = unsupported("send images in messages of /chat/", [])


class RolloutChatBody(RolloutFields):
    """A body of TRL's /chat/: several conversations."""

    messages: Conversations = becomes(PROMPT, default=...)
    chat_template_kwargs: TemplateKwargs | None = becomes(PROMPT)
    tools: Tools | None = becomes(PROMPT)


class SequencesBody(OpenBody):
    """A body of TRL's /get_sequence_logprobs/. prompt_lengths: for each sequence, the number of
    first tokens whose log-probabilities are omitted. top_logprobs: DEFAULT_TOP if absent, or the
    server's limit if that is less."""

    sequences: Sequences = becomes(PROMPT, default=...)
    prompt_lengths: Lengths = becomes(RESPONSE, default=...)
    top_logprobs: Positive | None = becomes("SamplingParams.prompt_logprobs")
    response_format: Literal["json", "binary"] = becomes(RESPONSE, default="json")
    temperature: Any = unsupported("log-probabilities are of the raw logits; use 1", 1)
