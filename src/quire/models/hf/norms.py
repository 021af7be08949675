"""Recognises what a transformers module without layers of its own computes, by trying it.

Classes of norms and activations have many names and few meanings. A module is called with a few
numbers, and is what gives the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from quire.ops.elementwise import gelu_tanh
from quire.ops.norms import layer_norm, rms_norm

USUAL_EPS = (1e-5, 1e-6, 1e-12)  # of those that do not say theirs


@dataclass(frozen=True)
class Norm:
    """is_rms: RMS or layer normalisation. offset: is added to the weight. parts: the parameters."""

    is_rms: bool
    size: int
    eps: float
    offset: float
    parts: tuple[str, ...]


@torch.no_grad()
def norm_of(module: nn.Module) -> Norm | None:
    """Return which norm a module is, if it is one."""
    parts = {name: each.shape for name, each in module.named_parameters()}
    shape = parts.get("weight", getattr(module, "normalized_shape", None))
    is_leaf = not list(module.children()) and not list(module.buffers())
    if "norm" not in type(module).__name__.lower() or not is_leaf or not set(parts) <= {
        "weight", "bias",
    } or shape is None or len(shape) != 1:  # fmt: skip
        return None
    size = int(shape[0])
    random = torch.Generator().manual_seed(0)
    given = {name: torch.rand(size, generator=random) + 0.5 for name in parts}
    x_TD = torch.randn(3, size, generator=random) * torch.tensor([[1.0], [1e-3], [30.0]])
    x_TD[0] += 0.5
    try:
        wanted = torch.func.functional_call(module, given, (x_TD,))
    except Exception:  # it is called in another way
        return None
    for norm in _candidates(module, size, tuple(parts)):
        if isinstance(wanted, torch.Tensor) and torch.allclose(
            _computed(norm, x_TD, given), wanted, 1e-5, 1e-6
        ):
            return norm
    return None


def _candidates(module: nn.Module, size: int, parts: tuple[str, ...]) -> Iterator[Norm]:
    own = [each for each in vars(module).values() if isinstance(each, float)]
    for eps in (*own, *USUAL_EPS):
        if parts == ("weight",):
            yield Norm(True, size, eps, 0.0, parts)
            yield Norm(True, size, eps, 1.0, parts)
        yield Norm(False, size, eps, 0.0, parts)


def _computed(norm: Norm, x_TD: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    if norm.is_rms:
        return rms_norm(x_TD, given["weight"] + norm.offset, norm.eps)
    return layer_norm(x_TD, given.get("weight"), given.get("bias"), norm.eps)


@torch.no_grad()
def is_gelu_by_tanh(module: nn.Module) -> bool:
    """Tell whether a module is this activation, written out."""
    if "GELU" not in type(module).__name__ or list(module.parameters()) or type(module) is nn.GELU:
        return False
    x = torch.linspace(-6.0, 6.0, 97)
    try:
        return torch.allclose(module(x), gelu_tanh(x), 1e-5, 1e-6)
    except Exception:  # it is called in another way
        return False
