"""Ids of responses and of their items, which name the API process that holds them."""

import uuid

MOST_PROCESSES = 1 << 16
_DIGITS = 4


def new_id(kind: str, process: int) -> str:
    """Return an id such as resp_00003f2a...: kind, number of the process, and chance."""
    return f"{kind}_{process:0{_DIGITS}x}{uuid.uuid4().hex}"


def process_of(given: str) -> int | None:
    """Return the number of the process that made an id; None for what is no id of ours."""
    _, _, rest = given.partition("_")
    if len(rest) != _DIGITS + 32:
        return None
    try:
        return int(rest[:_DIGITS], 16)
    except ValueError:
        return None
