"""Choice of a model's attention backend: one of quire's, or one of a plug-in package."""

import logging
from collections.abc import Callable, Mapping

import torch

from quire.base import plugins
from quire.base.errors import ConfigError
from quire.ops.attention import cpu, triton_gpu
from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.package_prompts import KERNELS, PackageBackend, fastest_for_prompts
from quire.ops.attention.reference import ReferenceBackend
from quire.ops.attention.torch_cpu import TorchBackend
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention.within_step import is_within_step, make_within_step

logger = logging.getLogger(__name__)

BACKENDS: dict[str, Callable[[KVLayout], AttentionBackend]] = {
    "cpu": CpuBackend,
    "torch": TorchBackend,
    "reference": ReferenceBackend,
    "triton": TritonBackend,
}
SMALL_TILES = "triton_64"  # triton with small tiles for prompts
NAMES = ("auto", *BACKENDS, SMALL_TILES, *KERNELS)


def make_backend(
    name: str,
    layout: KVLayout,
    kv_scales: Mapping[int, tuple[float, float]] | None = None,
    *,
    deterministic: bool = False,
) -> AttentionBackend:
    """Build the backend called `name`, with its KV tensors. `auto` selects the fastest backend for
    the layout; on a GPU, it measures installed packages. Plug-ins may add names.

    kv_scales: factors of a layer's fp8 keys and values, 1 if absent; plug-ins do not receive them.
    deterministic: whether a query's bits must not depend on how steps divide its sequence. Raises
    ConfigError for an unknown name, or a backend that does not support this layout.
    """
    if is_within_step(layout):
        return make_within_step(name, layout)
    if name == "auto":
        name = fastest(layout)
        if name == "triton" and not deterministic:
            name = fastest_for_prompts(layout)
    if name in NAMES and layout.kv_format == "fp8":
        _check_fp8(name, layout)
    scales = dict(kv_scales or {}) if layout.kv_format == "fp8" else {}
    if name == "triton" or (name == SMALL_TILES and not deterministic):
        return TritonBackend(
            layout,
            scales=scales,
            deterministic=deterministic,
            has_small_tiles=name == SMALL_TILES,
        )
    if deterministic:
        raise ConfigError(
            f"deterministic needs attention_backend triton, which is for GPUs, not {name}; remove"
            " one of them."
        )
    if name == "cpu":
        return CpuBackend(layout, scales=scales)
    if name in BACKENDS:
        return BACKENDS[name](layout)
    if name in KERNELS:
        return PackageBackend(layout, KERNELS[name]())
    kind = plugins.ATTENTION_BACKENDS
    if not plugins.is_installed(kind, name, NAMES):
        known = plugins.all_names(kind, NAMES)
        raise ConfigError(f"attention_backend must be one of {known}, got {name!r}.")
    found = plugins.load_plugin(kind, name, NAMES)
    if not issubclass(found, AttentionBackend):
        raise ConfigError(
            f"attention_backend {name!r} cannot be used: {found.__name__} must be a subclass of"
            " AttentionBackend (quire/ops/attention/base.py)."
        )
    make: Callable[[KVLayout], AttentionBackend] = found
    return make(layout)


def _check_fp8(name: str, layout: KVLayout) -> None:
    """Raise ConfigError for a backend without fp8. If the device's backend that supports fp8
    cannot be used here, the error gives the reason."""
    is_triton = name in ("triton", SMALL_TILES) or layout.device.type != "cpu"
    needed = "triton" if is_triton else "cpu"
    reason = triton_gpu.why_not(layout) if is_triton else cpu.why_not(layout)
    if reason is None and name in (needed, SMALL_TILES):
        return
    if reason is None:
        raise ConfigError(
            f"kv_cache_dtype fp8 is not supported by attention_backend {name}; remove"
            f" attention_backend, or use {needed}."
        )
    raise ConfigError(
        f"kv_cache_dtype fp8 needs attention_backend {needed}, which cannot be used here: {reason};"
        " use kv_cache_dtype int8 or auto."
    )


def fastest(layout: KVLayout) -> str:
    """Return the name of quire's fastest backend for the layout. Log the reason if a GPU does not
    get the triton backend."""
    if layout.dtype == torch.float64:
        return "reference"
    if layout.device.type == "cpu":
        return "cpu" if cpu.why_not(layout) is None else "torch"
    reason = triton_gpu.why_not(layout)
    if reason is None:
        return "triton"
    logger.info("attention by torch, not triton: %s", reason)
    return "torch"
