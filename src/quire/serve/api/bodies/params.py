"""A request's fields to SamplingParams: what it sets, else what the model's files say, else ours.

How long an answer may be is always a number here: what fits beside the prompt, if not less.
"""

from typing import Any, TypeVar

from quire.base.errors import CONTEXT_LENGTH_EXCEEDED
from quire.base.messages import Ready
from quire.base.requests.sampling_params import RequestOutputKind, SamplingParams
from quire.base.settings.config import ServerConfig
from quire.base.settings.kv_transfer import FIELD as KV_TRANSFER
from quire.render import truncation
from quire.render.generation import GenerationDefaults
from quire.render.renderer import RenderedPrompt
from quire.render.truncation import LEFT
from quire.serve.api.bodies.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from quire.serve.api.errors import ApiError, bad_request

Body = TypeVar("Body", bound=GenerationRequest)

DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI's

# Fields that SamplingParams has by the same name and with the same meaning.
OTHERS = {
    "max_tokens", "prompt_logprobs", "structured_outputs", "thinking_token_budget",
    "truncate_prompt_tokens", "truncation_side", "logprob_token_ids",
}  # fmt: skip
SAME = GenerationRequest.model_fields.keys() & set(SamplingParams.__struct_fields__) - OTHERS
# What they are where they mean nothing.
BEAMS = {"beam_width": 1, "length_penalty": 1.0, "early_stopping": False}


def completion_params(
    request: CompletionRequest, defaults: GenerationDefaults, room: int
) -> SamplingParams:
    """Make the parameters; max_tokens 0 gives one token, to be dropped. room: tokens that fit
    beside the prompt."""
    name, given = "max_tokens", request.max_tokens
    if given is None:
        length = min(DEFAULT_MAX_TOKENS, room)
    else:
        length = max(1, _fitting(name, given, 0, room))
    if given == 0 and request.min_tokens:
        raise bad_request(
            f"min_tokens={request.min_tokens} is more than max_tokens=0; raise max_tokens.",
            "min_tokens",
        )
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        prompt_logprobs = _more(request.logprobs, prompt_logprobs)
    return _params(
        request, defaults, length, request.logprobs, prompt_logprobs, best_of=request.best_of
    )


def chat_params(
    request: ChatCompletionRequest, defaults: GenerationDefaults, room: int
) -> SamplingParams:
    """Make the parameters. room: tokens that fit beside the prompt, which an answer without a limit
    may take."""
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    given = getattr(request, name)
    length = room if given is None else _fitting(name, given, 1, room)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _params(request, defaults, length, logprobs, request.prompt_logprobs)


def check_top_logprobs(request: ChatCompletionRequest, ready: Ready) -> None:
    """Check top_logprobs, which the engine knows by another name."""
    top = request.top_logprobs
    if top is None:
        return
    if not request.logprobs and top > 0:
        raise bad_request(f"top_logprobs={top} needs logprobs=true; set it.", "top_logprobs")
    if 0 <= ready.max_logprobs < top:
        raise bad_request(
            f"top_logprobs={top} is more than max_logprobs={ready.max_logprobs}; request fewer or"
            " raise max_logprobs.",
            "top_logprobs",
        )


def checked_stream_options(request: Body, config: ServerConfig) -> Body:
    """Return a body whose stream ends with its usage, if the server's settings say so. Raises
    ApiError for options of a stream that is none."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream=true; set it, or remove stream_options.",
                          "stream_options")  # fmt: skip
    if not (request.stream and config.enable_force_include_usage):
        return request
    options = (request.stream_options or StreamOptions.model_validate({})).model_copy(
        update={"include_usage": True}
    )
    return request.model_copy(update={"stream_options": options})


def room_beside(
    prompt: RenderedPrompt, max_model_len: int, param: str, can_cut: bool = True
) -> int:
    """Return how many tokens fit beside a prompt. param: the field that a 400 names. can_cut: the
    request may ask for its prompt to be cut."""
    room = max_model_len - len(prompt.token_ids)
    if room >= 1:
        return room
    or_cut = ", or set truncate_prompt_tokens=-1" if can_cut else ""
    raise ApiError(
        400,
        f"{param}: the prompt has {len(prompt.token_ids)} tokens, and max_model_len is"
        f" {max_model_len}, which must hold the answer as well. Shorten the prompt{or_cut}.",
        param=param,
        code=CONTEXT_LENGTH_EXCEEDED,
    )


def truncated(
    prompt: RenderedPrompt, request: GenerationRequest, max_model_len: int
) -> RenderedPrompt:
    """Return the prompt, cut to truncate_prompt_tokens; -1 is what fits beside max_tokens."""
    keep = request.truncate_prompt_tokens
    if keep == 0:
        raise bad_request(
            "truncate_prompt_tokens must be at least 1, or -1 for what fits, got 0.",
            "truncate_prompt_tokens",
        )
    room = max_model_len - max(1, _asked_length(request))
    return truncation.truncated(prompt, keep, room, request.truncation_side or LEFT)


def _asked_length(request: GenerationRequest) -> int:
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    if request.max_tokens is not None:
        return request.max_tokens
    return DEFAULT_MAX_TOKENS if isinstance(request, CompletionRequest) else 1


def _params(
    request: GenerationRequest,
    defaults: GenerationDefaults,
    length: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    best_of: int | None = None,
) -> SamplingParams:
    """Make the parameters. Raise RequestError that names the field."""
    _check_beams(request)
    values: dict[str, Any] = {} if request.use_beam_search else dict(defaults.sampling)
    for name in SAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    values["max_tokens"] = length
    values["best_of"] = best_of
    values["logprob_token_ids"] = request.logprob_token_ids or None
    values["logprobs"] = None if request.num_named else logprobs
    values["prompt_logprobs"] = prompt_logprobs
    if request.kv_transfer_params:
        values["extra_args"] = {KV_TRANSFER: request.kv_transfer_params}
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**values, output_kind=kind)


def _check_beams(request: GenerationRequest) -> None:
    """Refuse settings of a beam search without one."""
    if request.use_beam_search:
        return
    for name, neutral in BEAMS.items():
        value = getattr(request, name)
        if value not in (None, neutral):
            raise bad_request(f"{name}={value!r} needs use_beam_search=true; add it.", name)


def _fitting(name: str, value: int, least: int, room: int) -> int:
    if value < least:
        raise bad_request(f"{name} must be at least {least}, got {value}.", name)
    if value <= room:
        return value
    raise ApiError(
        400,
        f"{name}={value} is too large: max_model_len minus the tokens of the prompt leaves {room}."
        f" Request at most {room}, shorten the prompt, or remove {name}.",
        param=name,
        code=CONTEXT_LENGTH_EXCEEDED,
    )


def _more(first: int, second: int | None) -> int:
    """Return the larger of two numbers of candidates; -1 is all."""
    return -1 if -1 in (first, second) else max(first, second or 0)
