"""Look-up of rows in a table. Shape legend: T tokens, V rows of the table, D model dim."""

import torch

from quire.ops.gpu import kernels_for
from quire.ops.opaque import OpaqueWeight
from quire.ops.registry import op


@op("embedding")
def embedding(
    ids_T: torch.Tensor, weight_VD: torch.Tensor | OpaqueWeight, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Rows of the table [T, D] for int64 or int32 ids, which must lie in [0, V).

    dtype: of the result, for a packed table, which a tied head shares.
    """
    if isinstance(weight_VD, OpaqueWeight):
        assert dtype is not None
        return weight_VD.rows(ids_T.long().contiguous(), dtype)
    if kernels := kernels_for(weight_VD, "embedding"):
        found: torch.Tensor = kernels.embedding(ids_T, weight_VD)
        return found
    return torch.nn.functional.embedding(ids_T, weight_VD)


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
