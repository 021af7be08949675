"""Linear layers: x W^T + b, with the weight in the order that the device's matrix kernels read.

Shape legend: T tokens, K inputs, N outputs.

On a CPU the C++ core (csrc/linear.h) multiplies weights of 16 and 32 bits, and all quantised
weights. It is faster than torch for few tokens and as fast for many. A token's result has the same
bits in any batch. Without the core, oneDNN's packed order is used where it beats plain weights.
float64, and most weights on GPUs, are multiplied as plain tensors (docs/results/numbers.md).

A GPU has kernels for four other cases. `ops/kernels/matmul.py` multiplies weights of fixed order;
its results do not depend on the batch either. `ops/kernels/few_rows.py` multiplies one to four rows
with a plain weight where it beats the library (`fused_linear.py`: together with norms, gates and
additions). `ops/kernels/products/stream_k.py` multiplies 5 to 64 rows if its switch is on.
`gpu_weights.py` multiplies quantised weights.
"""

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
    """Return x W^T + b, [T, N], in x's dtype. weight: a plain tensor or `pack_weight`'s result."""
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
    stream = kernels_for(x_TK, "products.stream_k")
    if stream is not None and stream.serves(x_TK, weight_NK):
        stream_TN: torch.Tensor = stream.stream_k(x_TK, weight_NK, bias_N)
        return stream_TN
    return torch.nn.functional.linear(x_TK, weight_NK, bias_N)


def _room(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised memory [rows, columns]; large results reuse memory of SPARE."""
    num_bytes = rows * columns * dtype.itemsize
    if num_bytes < LARGE:
        return torch.empty(rows, columns, dtype=dtype)
    memory = SPARE.empty(num_bytes)
    return torch.from_numpy(memory).view(dtype).view(rows, columns)


def _native_linear(x_TK: torch.Tensor, weight: Packed, bias_N: torch.Tensor | None) -> torch.Tensor:
    """Multiply by the C++ core, part by part of the weight."""
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
