"""Look-up of rows: in an embedding table, in hidden states, and in the encoder memory.

A token of a media item has a negative id, -1 - slot, where `slot` is a row of the encoder memory.
The embedding of such a token is zeros.

Shape legend: T tokens, R selected rows, V rows of the table, D model dim, S slots, W numbers per
slot.
"""

import torch

from quire.ops.gpu import kernels_for
from quire.ops.registry import op
from quire.ops.weights.opaque import OpaqueWeight


@op("embedding")
def embedding(
    ids_T: torch.Tensor, weight_VD: torch.Tensor | OpaqueWeight, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return rows of the table, [T, D], for int64 or int32 ids below V; zeros for negative ids.
    dtype: dtype of the result, needed for a packed table, which a tied head shares."""
    if isinstance(weight_VD, OpaqueWeight):
        assert dtype is not None
        return weight_VD.rows(ids_T.long().contiguous(), dtype)
    if kernels := kernels_for(weight_VD, "embedding"):
        found: torch.Tensor = kernels.embedding(ids_T, weight_VD)
        return found
    found_TD = torch.nn.functional.embedding(ids_T.clamp(min=0), weight_VD)
    return found_TD.masked_fill_(ids_T[:, None] < 0, 0.0)


@op("select_rows")
def select_rows(x_TD: torch.Tensor, index_R: torch.Tensor) -> torch.Tensor:
    """Return the rows of x at the indices, [R, D]. index: int64."""
    return x_TD.index_select(0, index_R)


@op("part_of_embedding")
def part_of_embedding(
    ids_T: torch.Tensor,
    weight_VD: torch.Tensor | OpaqueWeight,
    first: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return rows [T, D] of a table that holds the rows from `first` of a larger table. Tokens
    whose row is in another part, and negative ids, get zeros. dtype: as for `embedding`."""
    own_T = ids_T.long() - first
    is_here_T = (own_T >= 0) & (own_T < weight_VD.shape[0])
    found_TD = embedding(own_T.where(is_here_T, 0), weight_VD, dtype)
    return found_TD.where(is_here_T[:, None], 0.0)


@op("place")
def place(x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor) -> torch.Tensor:
    """Return x [T, D] with the row of each negative id replaced by the first D numbers of its slot.

    memory: the encoder memory [S, W], float32 or float64, which has a row for each slot in `ids`.
    """
    if kernels := kernels_for(x_TD, "embedding"):
        placed: torch.Tensor = kernels.place(x_TD, ids_T, memory_SW)
        return placed
    return torch.where(ids_T[:, None] < 0, _features(x_TD, ids_T, memory_SW, 0), x_TD)


@op("add_features")
def add_features(
    x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor, offset: int
) -> torch.Tensor:
    """Add D numbers of its slot, from `offset` on, to the row of each negative id; return [T, D].
    This is DeepStack (arXiv 2406.04334). memory: the encoder memory, as for `place`."""
    if kernels := kernels_for(x_TD, "embedding"):
        added: torch.Tensor = kernels.add_features(x_TD, ids_T, memory_SW, offset)
        return added
    features_TD = _features(x_TD, ids_T, memory_SW, offset)
    return torch.where(ids_T[:, None] < 0, x_TD + features_TD, x_TD)


def _features(
    x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor, offset: int
) -> torch.Tensor:
    """Return D numbers of each token's slot, [T, D]; any numbers for tokens without a slot."""
    slots_T = (-1 - ids_T.long()).clamp(min=0)
    return memory_SW[slots_T, offset : offset + x_TD.shape[1]].to(x_TD.dtype)
