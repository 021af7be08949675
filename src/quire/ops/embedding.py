"""Look-up of rows: of a table, of hidden states, and of the encoder outputs that take their place.

A token of a media item has an id below 0: -1 - slot, where `slot` is a row of the encoder memory.
Its row of the table is zeros.

Shape legend: T tokens, R looked up rows, V rows of the table, D model dim, S slots, W numbers of a
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
    """Return rows of the table [T, D] for int64 or int32 ids below V; zeros for ids below 0.

    dtype: of the result, for a packed table, which a tied head shares.
    """
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
    """Return the rows of x that the int64 index names, as [R, D]."""
    return x_TD.index_select(0, index_R)


@op("part_of_embedding")
def part_of_embedding(
    ids_T: torch.Tensor,
    weight_VD: torch.Tensor | OpaqueWeight,
    first: int,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same of a table that begins with row `first` of a larger one: zeros for other rows."""
    own_T = ids_T.long() - first
    is_here_T = (own_T >= 0) & (own_T < weight_VD.shape[0])
    found_TD = embedding(own_T.where(is_here_T, 0), weight_VD, dtype)
    return found_TD.where(is_here_T[:, None], 0.0)


@op("place")
def place(x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor) -> torch.Tensor:
    """Return x with the first D numbers of its slot for each token whose id is below 0.

    memory: the encoder memory, float32 or float64; the slots must be among its rows.
    """
    if kernels := kernels_for(x_TD, "embedding"):
        placed: torch.Tensor = kernels.place(x_TD, ids_T, memory_SW)
        return placed
    return torch.where(ids_T[:, None] < 0, _features(x_TD, ids_T, memory_SW, 0), x_TD)


@op("add_features")
def add_features(
    x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor, offset: int
) -> torch.Tensor:
    """Return x plus D numbers of its slot, from `offset` on, for each token whose id is below 0.

    DeepStack (arXiv 2406.04334). memory: as of `place`.
    """
    if kernels := kernels_for(x_TD, "embedding"):
        added: torch.Tensor = kernels.add_features(x_TD, ids_T, memory_SW, offset)
        return added
    features_TD = _features(x_TD, ids_T, memory_SW, offset)
    return torch.where(ids_T[:, None] < 0, x_TD + features_TD, x_TD)


def _features(
    x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor, offset: int
) -> torch.Tensor:
    """Return each token's numbers of its slot, [T, D]; of tokens without a slot any."""
    slots_T = (-1 - ids_T.long()).clamp(min=0)
    return memory_SW[slots_T, offset : offset + x_TD.shape[1]].to(x_TD.dtype)
