"""Validation of requests whose blocks outlive a step: open prompts, pins, retained ones, forks."""

import array

from quire.base.clock import duration_rule, is_duration
from quire.base.errors import UNSUPPORTED, RequestError
from quire.base.messages import Request, RetainedRequest
from quire.base.requests.media_items import items_before
from quire.base.requests.sampling_params import SamplingParams

MAX_KEEP_S = 86400  # a day


def check_open(params: SamplingParams) -> None:
    """Raise RequestError if a prompt with these parameters cannot arrive in pieces."""
    if params.num_samples > 1 or params.use_beam_search:
        raise RequestError(
            "a prompt sent in pieces has one output; remove n, best_of and beam search.",
            "use_beam_search" if params.use_beam_search else params.width_field,
            UNSUPPORTED,
        )
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(params, name) is not None:
            raise RequestError(
                f"{name} is not possible for a prompt sent in pieces; remove it.", name, UNSUPPORTED
            )


def check_pin(request: Request) -> None:
    """Raise RequestError if a request is not suitable for pinning a prefix."""
    params, pin_s = request.params, request.pin_s
    if pin_s is None or not is_duration(pin_s):
        rule = duration_rule("to keep the prefix")
        raise RequestError(f"ttl_s must be {rule}, got {pin_s!r}.", "ttl_s")
    if not 0 < request.pin_share <= 1:
        message = f"pin_share must be above 0 and at most 1, got {request.pin_share}."
        raise RequestError(message, "pin_share")
    is_one = not request.is_open and params.num_samples == 1 and not params.use_beam_search
    if not is_one or request.grammar or params.prompt_logprobs is not None:
        raise RequestError(
            "a pinned prefix is one whole prompt without an output; remove n, best_of, beam search,"
            " the grammar and prompt_logprobs."
        )


def check_retainable(request: Request, keep_s: float) -> None:
    """Raise RequestError if a request cannot be retained, or is not a valid fork."""
    params, fork = request.params, request.fork
    if not 0 <= keep_s <= MAX_KEEP_S:
        raise RequestError(
            f"keep_s must be a number of seconds from 0 (not retained) to {MAX_KEEP_S}, a day, got"
            f" {keep_s!r}.",
            "keep_s",
        )
    if request.pin_s is not None or request.pools:
        raise RequestError("only generated sequences can be retained or forked; remove keep_s.")
    if keep_s and (params.use_beam_search or params.is_ranked):
        raise RequestError(
            "keep_s is not possible with beam search or best_of, which drop sequences; remove one"
            " of them.",
            "keep_s",
        )
    if fork is None:
        return
    if not 1 <= fork.num_tokens <= len(request.prompt_token_ids):
        raise RequestError(
            f"a fork at token {fork.num_tokens} cannot begin a prompt of"
            f" {len(request.prompt_token_ids)} tokens."
        )
    if fork.takes_over and params.num_samples > 1:
        raise RequestError("a fork with n above 1 cannot replace its source; set n to 1.")


def check_fork(request: Request, sources: list[RetainedRequest]) -> int:
    """Check that a fork begins with its source's tokens, and return the number of shared tokens.

    sources: the source, or an empty list. A fork without its source is computed like any other
        prompt, and 0 is returned. Raises RequestError if tokens, salt or adapter differ, or if
        media items of a missing source are needed."""
    fork, num_items = request.fork, 0
    if fork is None:
        return 0
    for source in sources:
        if fork.num_tokens > source.num_tokens or not _begins(request, source.tokens):
            raise RequestError(
                f"the prompt does not begin with the first {fork.num_tokens} tokens of request"
                f" {fork.request_id!r}; it may have been rewound. Get its tokens again."
            )
        num_items = len(items_before(source.media, fork.num_tokens))
        for name in ("cache_salt", "adapter_id"):
            if getattr(request, name) != getattr(source, name):
                raise RequestError(
                    f"{name} must be the same as that of the source of the fork.", name
                )
    if num_items < fork.num_items:
        raise RequestError(
            f"request {fork.request_id!r} no longer has the {fork.num_items} images and videos"
            f" among its first {fork.num_tokens} tokens; send the whole prompt with its images."
        )
    return fork.num_tokens if sources else 0


def _begins(request: Request, tokens: bytes) -> bool:
    """Return whether the tokens that a fork shares are the first of these (int32)."""
    assert request.fork is not None, "it is not a fork"
    try:
        begins = array.array("i", request.prompt_token_ids[: request.fork.num_tokens])
    except OverflowError:
        return False
    return tokens.startswith(begins.tobytes())
