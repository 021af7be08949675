"""Prompts that are cut to the tokens that a request sets (`truncate_prompt_tokens`)."""

from quire.base.errors import RequestError
from quire.base.requests.sampling_params import SamplingParams
from quire.render.renderer import RenderedPrompt

FIELD = "truncate_prompt_tokens"
LEFT, RIGHT = "left", "right"
FITTING = -1  # as many tokens as fit


def truncated(
    prompt: RenderedPrompt, keep: int | None, room: int, side: str = LEFT
) -> RenderedPrompt:
    """Return a prompt of at most `keep` tokens; None is all of it, -1 is `room`. side: where tokens
    are left out. What was cut has no text any more."""
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
    """Return a prompt as `SamplingParams.truncate_prompt_tokens` wants it, in a context of so many
    tokens."""
    room = max_model_len - (params.max_tokens or 1)
    return truncated(prompt, params.truncate_prompt_tokens, room, params.truncation_side)
