"""Which attention backend serves a model: one of ours, or of another package."""

from collections.abc import Callable

import torch

from quire.base import plugins
from quire.base.errors import ConfigError
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.cpu import CpuBackend, why_not
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.torch_cpu import TorchBackend

BACKENDS: dict[str, Callable[[KVLayout], AttentionBackend]] = {
    "cpu": CpuBackend,
    "torch": TorchBackend,
    "reference": ReferenceBackend,
}


def make_backend(name: str, layout: KVLayout) -> AttentionBackend:
    """The backend of that name, with its KV tensors. `auto` takes the fastest of ours for the
    layout; other packages may bring more.

    Raises ConfigError for a name that does not exist, or that cannot serve this layout.
    """
    if name == "auto":
        name = _fastest(layout)
    if name in BACKENDS:
        return BACKENDS[name](layout)
    kind, names = plugins.ATTENTION_BACKENDS, ("auto", *BACKENDS)
    if not plugins.is_installed(kind, name, names):
        known = plugins.all_names(kind, names)
        raise ConfigError(f"attention_backend must be one of {known}, got {name!r}.")
    backend: AttentionBackend = plugins.load_plugin(kind, name, names)(layout)
    return backend


def _fastest(layout: KVLayout) -> str:
    if layout.dtype == torch.float64:
        return "reference"
    return "cpu" if why_not(layout) is None else "torch"
