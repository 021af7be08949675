"""Penalties in the words of llama.cpp and Ollama.

There, penalties see the last `repeat_last_n` tokens of the text. Here they see the whole text, so
only -1 (all of it) and 0 (nothing) are possible with a penalty.
"""

from typing import Protocol

from quire.serve.errors import bad_request

# Name of a penalty here -> name in a body, and its value that changes nothing.
PENALTIES = {
    "repetition_penalty": ("repeat_penalty", 1.0),
    "presence_penalty": ("presence_penalty", 0.0),
    "frequency_penalty": ("frequency_penalty", 0.0),
}
NO_PENALTIES = {name: off for name, (_, off) in PENALTIES.items()}
NOTHING, WHOLE_TEXT = 0, -1


class HasPenalties(Protocol):
    """A body, or a part of one, with these fields; None is the default."""

    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repeat_last_n: int | None


def penalties_of(body: HasPenalties, field: str) -> dict[str, float | None]:
    """Return the penalties by their names in `SamplingParams`. field: of repeat_last_n, for the
    error. Raises ApiError for penalties of a part of the text."""
    if body.repeat_last_n == NOTHING:
        return dict(NO_PENALTIES)
    found = {name: getattr(body, own) for name, (own, _) in PENALTIES.items()}
    is_used = any(found[name] not in (None, off) for name, off in NO_PENALTIES.items())
    if is_used and body.repeat_last_n not in (None, WHOLE_TEXT):
        raise bad_request(
            f"{field}={body.repeat_last_n}: penalties apply to the whole text; remove it, or set"
            " -1.",
            field,
        )
    return found
