"""Prompts that are cut to the tokens that a request sets (`truncate_prompt_tokens`)."""

from quire.base.errors import RequestError
from quire.base.requests.sampling_params import SamplingParams
from quire.render.renderer import RenderedPrompt

FIELD = "truncate_prompt_tokens"
LEFT, RIGHT = "left", "right"
FITTING = -1  # truncate to the tokens that fit


def truncated(
    prompt: RenderedPrompt, keep: int | None, room: int, side: str = LEFT
) -> RenderedPrompt:
    """Return a prompt of at most `keep` tokens.

    keep: None keeps all tokens; -1 stands for `room`. side: end of the prompt at which tokens are
    dropped. A truncated prompt has no text. Raises RequestError instead of truncating images.
    """
    if keep is None:
        return prompt
    if keep == FITTING:
        keep = max(1, room)
    if len(prompt.token_ids) <= keep:
        return prompt
    if prompt.media:
        raise RequestError(
            f"{FIELD}={keep} would cut a prompt with images, which has"
            f" {len(prompt.token_ids)} tokens; remove the parameter, or shorten the prompt.",
            FIELD,
        )
    token_ids = prompt.token_ids
    return RenderedPrompt(token_ids[:keep] if side == RIGHT else token_ids[-keep:])


def truncated_for(
    params: SamplingParams, prompt: RenderedPrompt, max_model_len: int
) -> RenderedPrompt:
    """Return a prompt truncated to `SamplingParams.truncate_prompt_tokens`. The value -1 leaves
    room for `max_tokens` within `max_model_len`."""
    room = max_model_len - (params.max_tokens or 1)
    return truncated(prompt, params.truncate_prompt_tokens, room, params.truncation_side)
