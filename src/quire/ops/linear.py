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

import torch

from quire.ops.gpu import kernels_for
from quire.ops.host.native import address, needed_core
from quire.ops.host.spare_memory import LARGE, SPARE
from quire.ops.host.threads import num_threads
from quire.ops.precision import FixedOrderWeight
from quire.ops.registry import op
from quire.ops.weights.device_weights import Weight
from quire.ops.weights.gpu_weights import GPUWeight, multiply
from quire.ops.weights.packed import ELEMENTS, Packed, PackedParts, PackedWeight


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
