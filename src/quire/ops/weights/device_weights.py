"""Weights of linear layers in the order that a device multiplies; the order is chosen at load.

On a CPU it is the C++ core's order (`pack.py`), or without the core oneDNN's or the plain order. On
a GPU plain weights stay tensors, and quantised weights have their own order (`gpu_weights.py`).
`quire.ops.linear` multiplies all of them.

Shape legend: K inputs, N outputs, E experts.
"""

from collections.abc import Sequence

import torch

from quire.base.errors import ConfigError
from quire.ops.gpu import has_kernels
from quire.ops.host.host_memory import HugeMemory
from quire.ops.weights.formats import Packing, Quantization, check_quantization, core_packing
from quire.ops.weights.gpu_weights import (
    GPUWeight,
    pack_for_gpu,
    quantise_for_gpu,
    stack_experts,
)
from quire.ops.weights.pack import can_pack_natively, joined, pack, pack_stored
from quire.ops.weights.packed import PackedParts, PackedWeight
from quire.ops.weights.stored_rows import StoredRows, stacked

Weight = torch.Tensor | PackedWeight | PackedParts | GPUWeight
# Number of tokens for which oneDNN's packed order is chosen; it works with any other number.
TYPICAL_TOKENS = 16


def pack_weight(
    weight_NK: torch.Tensor,
    quantization: Quantization | None = None,
    memory: HugeMemory | None = None,
) -> Weight:
    """Return the weight [N, K] in packed order if this device and dtype have one, else the weight
    itself. memory: destination of the core's packed order.

    Raises ConfigError if the weight cannot be quantised as requested.
    """
    dtype, device = weight_NK.dtype, weight_NK.device
    if quantization is not None:
        if has_kernels(dtype, device):
            return quantise_for_gpu(weight_NK, quantization)
        check_quantization(dtype_name(dtype), device.type)
    if can_pack_natively(dtype, device):
        return pack(weight_NK, quantization, memory=memory)
    if not can_pack(dtype, device):
        return weight_NK
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK, TYPICAL_TOKENS)
    return packed


def pack_experts(weight_ENK: torch.Tensor, quantization: Quantization | None) -> Weight:
    """Return the weights [E, N, K] of experts, which a GPU multiplies at once. If requested, they
    are quantised, one expert after the other."""
    if quantization is None:
        return weight_ENK
    check_quantization(dtype_name(weight_ENK.dtype), "cuda")
    return stack_experts(quantise_for_gpu(each_NK, quantization) for each_NK in weight_ENK)


def stacked_weights(weights: list[Weight]) -> Weight:
    """Stack the weights of experts to one weight [E, N, K]."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if tensors:
        return torch.stack(tensors)
    return stack_experts(weight for weight in weights if isinstance(weight, GPUWeight))


def pack_rows(
    rows: StoredRows, dtype: torch.dtype, device: torch.device, memory: HugeMemory | None = None
) -> Weight:
    """Return a weight that a checkpoint quantised, in the device's order; its numbers do not
    change. dtype: dtype of activations. memory: destination of the core's order.

    Raises ConfigError if the device has no kernel for the format.
    """
    if has_kernels(dtype, device):
        return pack_for_gpu(rows, device)
    if can_pack_natively(dtype, device):
        return pack_stored(rows, memory)
    kind = type(rows).__name__
    raise ConfigError(f"there is no kernel for weights stored as {kind} on {device.type}.")


def pack_merged(
    parts: Sequence[StoredRows | torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    memory: HugeMemory | None = None,
) -> Weight:
    """Pack a weight from parts [N, K], one below the other: stored rows or plain tensors. Parts of
    one kind become one product. Others become several products, on a CPU only.

    Raises ConfigError if the device has no kernel for them.
    """
    rows = [part for part in parts if not isinstance(part, torch.Tensor)]
    difference = "some are plain numbers"
    if len(rows) == len(parts):
        try:
            merged = rows[0] if len(rows) == 1 else stacked(rows)
        except ValueError as error:
            difference = f"they differ in {error}"
        else:
            return pack_rows(merged, dtype, device, memory)
    if not can_pack_natively(dtype, device):
        raise ConfigError(
            f"parts of a layer are stored in different ways ({difference}), for which there is no"
            f" kernel on {device.type}; --quantization none computes them in the dtype."
        )
    packed = [
        pack(part.to(dtype), None) if isinstance(part, torch.Tensor) else pack_stored(part)
        for part in parts
    ]
    return joined(packed, memory)


def check_rows(subject: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError, with advice, if `pack_rows` has no kernel. subject: names the weights."""
    if has_kernels(dtype, device) or can_pack_natively(dtype, device):
        return
    raise ConfigError(
        f"{subject} have no kernel for their stored format on {device.type} in"
        f" {dtype_name(dtype)}. A"
        " CPU needs the C++ core and a dtype of 16 or 32 bits; a GPU needs Triton and 16 bits."
        " --quantization none computes the weights in the dtype."
    )


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether there are a packed order and fast kernels for weights of this dtype."""
    if can_pack_natively(dtype, device):
        return True
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def packing(dtype: torch.dtype, device: torch.device) -> Packing:
    """Return how pack_weight stores weights of this dtype on the device."""
    name = dtype_name(dtype)
    if has_kernels(dtype, device):
        return Packing(name, is_gpu=True)
    found = core_packing(name) if device.type == "cpu" else None
    return found or Packing(name, is_reordered=can_pack(dtype, device))


def packed_weight_bytes(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization | None = None,
) -> int:
    """Return the bytes of pack_weight's result for a weight of this shape."""
    return packing(dtype, device).weight_bytes(shape, quantization)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as the configuration spells it."""
    return str(dtype).removeprefix("torch.")
