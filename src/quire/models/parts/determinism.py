"""Make a loaded model batch-invariant.

A token's hidden state and logits then have the same bits, whatever other tokens its steps contain
and however its sequence is divided into steps. A model computes only through operations. On a GPU,
most operations work row by row. Layers and experts get weights whose type fixes the order of sums.
Attention has a backend mode (`TritonBackend(layout, deterministic=True)`). On a CPU with the C++
core, packed weights are batch-invariant already.
"""

import torch
from torch import nn

from quire.base.errors import ConfigError
from quire.models.model import Model
from quire.models.parts.experts import StackedExperts
from quire.models.parts.head_linear import HeadLinear
from quire.models.parts.layers import Embedding, Linear, LMHead
from quire.ops.gpu import kernels_for
from quire.ops.precision import FixedOrderWeight
from quire.ops.weights.gpu_weights import GPUWeight
from quire.ops.weights.opaque import OpaqueWeight

MULTIPLIED: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (Linear, ("weight",)),
    (LMHead, ("weight",)),
    (StackedExperts, ("gate_up", "down")),
)


def make_deterministic(model: nn.Module) -> None:
    """Replace the weights of matrix products by weights with a fixed order of sums.

    No memory is copied, and shared weights (of a tied embedding) stay shared. A second call changes
    nothing. Raises ConfigError, with the model unchanged, if a weight does not support a fixed
    order, or if code other than quire's operations computes.
    """
    if isinstance(model, Model) and not model.only_operations:
        raise ConfigError(
            "deterministic needs a model with quire's operations; this one runs code of"
            " transformers, whose sums have no fixed order."
        )
    if any(
        isinstance(module, HeadLinear) and isinstance(module.weight, torch.Tensor)
        for module in model.modules()
    ):
        raise ConfigError(
            "deterministic has no kernel for the products of heads in latent attention; remove it."
        )
    made: dict[int, FixedOrderWeight | GPUWeight] = {}
    for name, weight in _multiplied(model):
        if isinstance(weight, GPUWeight) and id(weight) not in made:
            made[id(weight)] = weight.fixed()
        if isinstance(weight, OpaqueWeight | FixedOrderWeight):
            continue
        if weight.is_mkldnn or kernels_for(weight, "matmul") is None:
            raise ConfigError(
                f"deterministic needs a GPU with triton and float32, float16 or bfloat16, or a CPU"
                f" with quire's C++ core; {name} is {weight.dtype} on {weight.device}."
            )
        if id(weight) not in made:
            made[id(weight)] = FixedOrderWeight(weight)
    for module in model.modules():
        for name in _names(module, (*MULTIPLIED, (Embedding, ("weight",)))):
            fixed = made.get(id(getattr(module, name)))
            if fixed is not None:
                setattr(module, name, fixed)


def _multiplied(model: nn.Module) -> list[tuple[str, torch.Tensor | OpaqueWeight]]:
    """List the names and weights that matrix products use."""
    return [
        (f"{prefix}.{name}", getattr(module, name))
        for prefix, module in model.named_modules()
        for name in _names(module, MULTIPLIED)
    ]


def _names(
    module: nn.Module, kinds: tuple[tuple[type[nn.Module], tuple[str, ...]], ...]
) -> tuple[str, ...]:
    return next((names for kind, names in kinds if isinstance(module, kind)), ())
