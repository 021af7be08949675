"""Cutting a prompt to the tokens that a request wants of it."""

from quire.base.errors import RequestError
from quire.base.sampling_params import SamplingParams
from quire.render.renderer import RenderedPrompt

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
            f"truncate_prompt_tokens={keep} would cut a prompt with images, which has"
            f" {len(prompt.token_ids)} tokens; remove the parameter, or shorten the prompt.",
            "truncate_prompt_tokens",
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
