"""Token ids that say to which of two texts a token belongs, and what becomes of them.

    id of a token of the second text = id + SECOND_TEXT      (base/pooling.py)

Shape legend: T tokens.
"""

import torch

from quire.base.pooling import SECOND_TEXT
from quire.ops.registry import op


@op("plain_ids")
def plain_ids(ids_T: torch.Tensor) -> torch.Tensor:
    """Return the ids without that."""
    return ids_T % SECOND_TEXT


@op("segment_ids")
def segment_ids(ids_T: torch.Tensor) -> torch.Tensor:
    """Return 0 for tokens of the first text, 1 for those of the second."""
    return ids_T // SECOND_TEXT
