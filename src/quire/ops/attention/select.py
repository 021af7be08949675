"""Which attention backend serves a model."""

from collections.abc import Callable

import torch

from quire.base.errors import ConfigError
from quire.base.model_spec import CacheGroup
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.torch_cpu import TorchBackend

BACKENDS: dict[str, Callable[[KVLayout], AttentionBackend]] = {
    "torch": TorchBackend,
    "reference": ReferenceBackend,
}


def make_backend(name: str, layout: KVLayout) -> AttentionBackend:
    """The backend of that name, with its KV tensors. `auto` takes the fastest one for the layout.

    Raises ConfigError for a name that does not exist.
    """
    if name == "auto":
        name = "reference" if layout.dtype == torch.float64 else "torch"
    if name not in BACKENDS:
        known = ", ".join(("auto", *BACKENDS))
        raise ConfigError(f"attention_backend must be one of {known}, got {name!r}.")
    return BACKENDS[name](layout)


def kv_block_bytes(group: CacheGroup, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block of the group takes, over all of its layers."""
    return group.block_bytes(block_size, dtype.itemsize)
