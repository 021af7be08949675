"""The gates that feed-forward layers have, by the names of their activations in configs.

Keep the names as base/model_options.GATES has them: it refuses others without torch.
"""

from collections.abc import Callable

import torch

from quire.base.errors import ModelError
from quire.ops.elementwise import gelu_mul, gelu_tanh_mul, silu_mul

Gate = Callable[[torch.Tensor], torch.Tensor]

GATES: dict[str, Gate] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu": gelu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
    "gelu_new": gelu_tanh_mul,
}


def gate(name: str) -> Gate:
    """Return the gate of an activation. Raises ModelError for one that no gate here has."""
    if name not in GATES:
        known = ", ".join(GATES)
        raise ModelError(f"the activation {name!r} is not supported; supported are {known}.")
    return GATES[name]
