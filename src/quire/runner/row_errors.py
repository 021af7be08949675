"""Why a row has no token. No torch."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from quire.runner.step_ops import Asked

NOT_FINITE = "The model's logits for this sequence are not finite (NaN or infinity)."
_NOTHING_LEFT = (
    "No token can be chosen: the model's logits are not finite, or allowed_token_ids, bad_words,"
    " min_tokens, logit_bias and logits_processors together leave no token."
)
_NOTHING_ALLOWED = (
    "No token can be chosen: the model's logits are not finite, or the grammar of"
    " structured_outputs leaves no token. Check also allowed_token_ids, bad_words, min_tokens,"
    " logit_bias and logits_processors."
)


def reasons_of(
    rows_N: npt.NDArray[np.int32],
    tokens_N: npt.NDArray[np.int32],
    asked: "Asked",
    told: dict[int, str],
) -> dict[int, str]:
    """Say of rows without a token (-1) why there is none. asked: by these rows, at its first
    places; told: what is known to be wrong with rows."""
    failed = rows_N[tokens_N < 0].tolist() + [row for row in rows_N.tolist() if row in told]
    if not failed:
        return {}
    processed = [] if asked.extras is None else asked.extras.processed
    reasons = {int(asked.rows[n]): _NOTHING_LEFT for n in [*asked.spans, *processed]}
    reasons |= {int(asked.rows[n]): _NOTHING_ALLOWED for n in asked.masked}
    return {row: told.get(row) or reasons.get(row, NOT_FINITE) for row in failed}


def unservable(reasons: dict[int, str]) -> tuple[int, ...]:
    """List the rows that have no token through no fault of the step."""
    return tuple(row for row, why in reasons.items() if why != NOT_FINITE)
