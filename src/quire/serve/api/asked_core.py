"""Which of several cores a request asks for, in vLLM's header."""

from starlette.types import Scope

from quire.serve.api.errors import bad_request
from quire.serve.api.validation_errors import shown

HEADER = b"x-data-parallel-rank"
MOST_DIGITS = 9


def asked_core(scope: Scope) -> int | None:
    """Return the core's number, None if none is named. Whether there is one of that number is
    checked with the request. Raise ApiError for what is no number."""
    given = [value for name, value in scope["headers"] if name == HEADER]
    if not given:
        return None
    if len(given) > 1 or not given[0].isdigit() or len(given[0]) > MOST_DIGITS:
        what = shown(b", ".join(given).decode("latin-1"))
        raise bad_request(
            f"the header X-data-parallel-rank must be the number of a core, got {what}; remove it"
            " to let the server choose the core.",
            "data_parallel_rank",
        )
    return int(given[0])
