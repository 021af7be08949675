"""Layer normalisation. Shape legend: T tokens, D model dim."""

import torch

from quire.ops.registry import op


@op("layer_norm")
def layer_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor | None, bias_D: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension."""
    return torch.nn.functional.layer_norm(x_TD, x_TD.shape[-1:], weight_D, bias_D, eps)
