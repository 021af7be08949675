"""Makes a loaded model batch-invariant: a token's hidden state and logits have the same bits
whatever else is in its steps, and however its sequence was cut into them.

All that a model computes goes through operations. On a GPU most of them work row by row; products
of layers and experts get weights whose type asks for one order of sums, and attention has a mode
of its backend (`TritonBackend(layout, deterministic=True)`). On a CPU with the C++ core packed
weights keep that promise as they are.
"""

import torch
from torch import nn

from quire.base.errors import ConfigError
from quire.models.model import Model
from quire.models.parts.experts import StackedExperts
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
    """Give the weights that are multiplied a fixed order of sums. No memory is copied, and what
    shares a weight (a tied embedding) goes on sharing it. Doing it twice changes nothing.

    Raises ConfigError, with the model unchanged, where a weight can have no fixed order, or where
    something else than operations computes.
    """
    if isinstance(model, Model) and not model.only_operations:
        raise ConfigError(
            "deterministic needs a model with quire's operations; this one runs code of"
            " transformers, whose sums have no fixed order."
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
    """Weights and what they are called."""
    return [
        (f"{prefix}.{name}", getattr(module, name))
        for prefix, module in model.named_modules()
        for name in _names(module, MULTIPLIED)
    ]


def _names(
    module: nn.Module, kinds: tuple[tuple[type[nn.Module], tuple[str, ...]], ...]
) -> tuple[str, ...]:
    return next((names for kind, names in kinds if isinstance(module, kind)), ())
