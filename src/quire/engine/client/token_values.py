"""Values of a sequence's tokens, joined from the pieces that steps report.

Shape legend: N tokens of the sequence that the model has computed.
"""

from collections.abc import Iterable

import numpy as np

from quire.base.plan import UNKNOWN, Int16, TokenValues


def joined(pieces: Iterable[TokenValues], num_tokens: int) -> Int16 | None:
    """Return the values of the first N tokens, [N, ...]; later pieces replace earlier ones. None
    without pieces."""
    found: Int16 | None = None
    for piece in pieces:
        if found is None:
            found = np.full((num_tokens, *piece.shape), UNKNOWN, np.int16)
        own = piece.values.reshape(-1, *piece.shape)[: max(0, num_tokens - piece.first)]
        found[piece.first : piece.first + len(own)] = own
    return found
