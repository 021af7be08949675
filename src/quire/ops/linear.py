"""x W^T + b, with the weight in the order that the device's matrix kernels take.

Shape legend: T tokens, K inputs, N outputs.

On a CPU with the C++ core (csrc/linear.h) weights of 16 and 32 bits, and all quantised ones,
are multiplied by it: faster than torch with few tokens, equal with many, and each token's
result has the same bits in any batch. Without the core oneDNN's packed order is taken where it
is faster than plain weights; float64 and GPUs multiply plain tensors (docs/results/numbers.md).
A GPU multiplies a weight of fixed order by a kernel of ours (`ops/kernels/matmul.py`), which
gives that same promise, one to four rows with a plain weight by another
(`ops/kernels/few_rows.py`), where it is faster than the library, and quantised ones by others
(`gpu_weights.py`)."""

from collections.abc import Sequence

import torch

from quire.base.errors import ConfigError
from quire.ops.gpu import has_kernels, kernels_for
from quire.ops.host.host_memory import HugeMemory
from quire.ops.host.native import address, needed_core
from quire.ops.host.spare_memory import LARGE, SPARE
from quire.ops.host.threads import num_threads
from quire.ops.precision import FixedOrderWeight
from quire.ops.registry import op
from quire.ops.weights.formats import Packing, Quantization, check_quantization, core_packing
from quire.ops.weights.gpu_weights import (
    GPUWeight,
    multiply,
    pack_for_gpu,
    quantise_for_gpu,
    stack_experts,
)
from quire.ops.weights.pack import can_pack_natively, joined, pack, pack_stored
from quire.ops.weights.packed import ELEMENTS, Packed, PackedParts, PackedWeight
from quire.ops.weights.stored_rows import StoredRows, stacked

Weight = torch.Tensor | PackedWeight | PackedParts | GPUWeight


@op("linear")
def linear(
    x_TK: torch.Tensor, weight_NK: Weight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, N] in x's dtype. The weight is a plain tensor or what pack_weight made of it."""
    if isinstance(weight_NK, PackedWeight | PackedParts):
        return _native_linear(x_TK, weight_NK, bias_N)
    if isinstance(weight_NK, GPUWeight):
        return multiply(x_TK, weight_NK, bias_N)
    if isinstance(weight_NK, FixedOrderWeight):
        kernels = kernels_for(x_TK, "matmul")
        assert kernels is not None, f"no fixed order on {x_TK.device} for {x_TK.dtype}"
        fixed_TN: torch.Tensor = kernels.matmul(x_TK, weight_NK, bias_N)
        return fixed_TN
    if weight_NK.is_mkldnn:
        packed_linear = torch.ops.mkldnn._linear_pointwise
        result_TN: torch.Tensor = packed_linear(x_TK, weight_NK, bias_N, "none", [], "")
        return result_TN
    few = kernels_for(x_TK, "few_rows")
    if few is not None and few.serves(x_TK, weight_NK):
        few_TN: torch.Tensor = few.few_rows(x_TK, weight_NK, bias_N)
        return few_TN
    return torch.nn.functional.linear(x_TK, weight_NK, bias_N)


def _room(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    num_bytes = rows * columns * dtype.itemsize
    if num_bytes < LARGE:
        return torch.empty(rows, columns, dtype=dtype)
    memory = SPARE.empty(num_bytes)
    return torch.from_numpy(memory).view(dtype).view(rows, columns)


def _native_linear(x_TK: torch.Tensor, weight: Packed, bias_N: torch.Tensor | None) -> torch.Tensor:
    (outputs, inputs), dtype = weight.shape, x_TK.dtype
    assert x_TK.dim() == 2 and x_TK.shape[1] == inputs
    out_TN = _room(x_TK.shape[0], outputs, dtype)
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    first = 0
    for part in weight.parts:
        end = first + part.shape[0]
        needed_core().linear(
            out_TN[:, first:].data_ptr(),
            x_TK.data_ptr(),
            0 if bias_N is None else address(bias_N[first:end], dtype),
            ELEMENTS[dtype],
            x_TK.shape[0],
            x_TK.stride(0),
            outputs,
            part.core,
            num_threads(),
        )
        first = end
    return out_TN


def pack_weight(
    weight_NK: torch.Tensor,
    quantization: Quantization | None = None,
    memory: HugeMemory | None = None,
) -> Weight:
    """Return the weight in packed order if this device and dtype have one, else the weight itself.
    memory: where the core's packed order is put.

    Raises ConfigError where it cannot be quantised.
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
    """Return the weights of experts, which a GPU multiplies at once, quantised if that is asked
    for: one expert after the other."""
    if quantization is None:
        return weight_ENK
    check_quantization(dtype_name(weight_ENK.dtype), "cuda")
    return stack_experts(quantise_for_gpu(each_NK, quantization) for each_NK in weight_ENK)


def stacked_weights(weights: list[Weight]) -> Weight:
    """Put the weights of experts side by side: [E, N, K]."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    if tensors:
        return torch.stack(tensors)
    return stack_experts(weight for weight in weights if isinstance(weight, GPUWeight))


def pack_rows(
    rows: StoredRows, dtype: torch.dtype, device: torch.device, memory: HugeMemory | None = None
) -> Weight:
    """Return a weight that a checkpoint quantised, in the order that the device multiplies; its
    numbers stay what they are. dtype: of activations. memory: where the core's order is put.

    Raises ConfigError where the device has no kernel for the format.
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
    """Do that with a weight whose parts, one under the other, are stored by themselves, some maybe
    as plain numbers: one product where all are of one kind, else on a CPU several side by side.

    Raises ConfigError where the device has no kernel for that.
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


def check_rows(what: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError, saying what to do, where pack_rows has no kernel. what: the weights."""
    if has_kernels(dtype, device) or can_pack_natively(dtype, device):
        return
    raise ConfigError(
        f"{what} have no kernel for their stored format on {device.type} in {dtype_name(dtype)}. A"
        " CPU needs the C++ core and a dtype of 16 or 32 bits; a GPU needs Triton and 16 bits."
        " --quantization none computes the weights in the dtype."
    )


# The number of tokens that oneDNN's packed order is chosen for; any other number works with it.
TYPICAL_TOKENS = 16


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether there is a packed order and fast kernels for such weights."""
    if can_pack_natively(dtype, device):
        return True
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def packing(dtype: torch.dtype, device: torch.device) -> Packing:
    """Tell how pack_weight stores weights of this dtype there."""
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
    """Count the bytes of pack_weight's result."""
    return packing(dtype, device).weight_bytes(shape, quantization)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in the configuration."""
    return str(dtype).removeprefix("torch.")
