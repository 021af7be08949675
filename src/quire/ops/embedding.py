"""Look-up of rows in a table. Shape legend: T tokens, V rows of the table, D model dim."""

import torch

from quire.ops.registry import op


@op("embedding")
def embedding(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Rows of the table [T, D] for int64 or int32 ids, which must lie in [0, V)."""
    return torch.nn.functional.embedding(ids_T, weight_VD)
