"""What stands in the place of a weight's tensor where a device has an order of its own for it."""

import torch


class OpaqueWeight:
    """A weight that is no tensor. Only the operations that multiply it, or look up its rows, know
    what is in it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] of a linear layer, or [E, N, K] of experts."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    @property
    def serves_look_up(self) -> bool:
        """Whether an embedding that is tied to it may take its rows, instead of keeping a table."""
        return False

    def rows(self, ids_U: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows [U, K] of these outputs, int64, as they were stored."""
        raise NotImplementedError
