"""The Gaussian error linear unit, exact and approximated. Legend: T tokens, F feed-forward dim."""

import torch

from quire.ops.registry import op

QUICK_GELU = 1.702


@op("gelu")
def gelu(x_TF: torch.Tensor) -> torch.Tensor:
    """x times the normal distribution function of x."""
    return torch.nn.functional.gelu(x_TF)


@op("gelu_tanh")
def gelu_tanh(x_TF: torch.Tensor) -> torch.Tensor:
    """The approximation by tanh (`gelu_new`, `gelu_pytorch_tanh` in configs)."""
    return torch.nn.functional.gelu(x_TF, approximate="tanh")


@op("quick_gelu")
def quick_gelu(x_TF: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(1.702 x), the approximation of CLIP's towers."""
    return x_TF * torch.sigmoid(QUICK_GELU * x_TF)
