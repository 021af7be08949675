"""Run transformers' classes in full float64.

They compute angles, norms, softmax and routing in float32, whatever the model's dtype."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WholePrecision(TorchFunctionMode):
    """Within this context, torch's functions use float64 instead of float32, also as a dtype.

    Create the model within it too, since creation computes frequencies.
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
