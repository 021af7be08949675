"""Tensors of a transformers model that checkpoints do not store, such as rotary frequencies."""

from typing import Any

import torch
from torch import nn

from quire.base.errors import ModelError

META = torch.device("meta")


@torch.no_grad()
def make_real(model: Any, name: str, module: nn.Module) -> None:
    """Initialise a module's buffers that checkpoints do not store, as transformers does on loading.
    model: the module's innermost transformers model, whose rule sets the values. Raise ModelError
    if a buffer has no value afterwards."""
    passing = _passing(module)
    for each in passing:
        empty = torch.empty_like(module.get_buffer(each), device="cpu")
        if empty.is_floating_point():
            empty.fill_(torch.nan)
        setattr(module, each, empty)
    if passing:
        try:
            model._init_weights(module)
        except Exception as error:  # any error of foreign code
            raise ModelError(
                f"{type(model).__name__} cannot run: its rule of how {name}.{passing[0]} begins"
                f" fails ({error})."
            ) from error
    for each in passing:
        values = module.get_buffer(each)
        if values.is_floating_point() and values.isnan().any():
            raise ModelError(f"{type(model).__name__} cannot run: {name}.{each} has no value.")
    for each, values in vars(module).items():
        if isinstance(values, torch.Tensor) and values.device == META:
            raise ModelError(
                f"{type(model).__name__} cannot run: {name}.{each} is computed by its own code."
            )


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module's buffers that checkpoints do not store to a device."""
    for each in _passing(module):
        setattr(module, each, module.get_buffer(each).to(device))


def _passing(module: nn.Module) -> list[str]:
    own = [name for name, _ in module.named_buffers(recurse=False)]
    return [name for name in own if name in module._non_persistent_buffers_set]
