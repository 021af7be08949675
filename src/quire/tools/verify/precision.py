"""Computes in float64 what transformers' classes compute in float32 whatever the model's dtype:
angles, norms, softmax, routing. So that a float64 model of theirs is one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WholePrecision(TorchFunctionMode):
    """While it is entered, torch's functions take float64 for float32, also as a dtype to make.

    Enter it when the model is made too: frequencies are made there.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **named)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
