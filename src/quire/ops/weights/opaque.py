"""Base of weights that a device stores in an order of its own, in place of a tensor."""

import torch


class OpaqueWeight:
    """Weight that is not a tensor. Only operations that multiply or look it up know its content."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K] of a linear layer, or [E, N, K] of experts."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        raise NotImplementedError

    @property
    def serves_look_up(self) -> bool:
        """Whether a tied embedding may look up its rows, so that it needs no table."""
        return False

    def rows(self, ids_U: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the dequantised rows [U, K] of these outputs. ids: int64."""
        raise NotImplementedError
