"""x W^T + b, with the weight packed for the CPU's matrix kernels where that is faster.

Shape legend: T tokens, K inputs, N outputs.

Packing puts the weight in the order in which oneDNN's kernels read it. Without it they reorder the
weight at each call, which costs as much as the product itself when T is small (docs/numbers.md).
"""

import torch

from quire.ops.registry import op


@op("linear")
def linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, N] in x's dtype. The weight is a plain tensor or one from pack_weight."""
    if weight_NK.is_mkldnn:
        packed_linear = torch.ops.mkldnn._linear_pointwise
        result_TN: torch.Tensor = packed_linear(x_TK, weight_NK, bias_N, "none", [], "")
        return result_TN
    return torch.nn.functional.linear(x_TK, weight_NK, bias_N)


def pack_weight(weight_NK: torch.Tensor) -> torch.Tensor:
    """The weight in packed order if this device and dtype have one, else the weight itself."""
    if not can_pack(weight_NK):
        return weight_NK
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_NK, TYPICAL_TOKENS)
    return packed


# The number of tokens that the packed order is chosen for; any other number works with it.
TYPICAL_TOKENS = 16


def can_pack(weight_NK: torch.Tensor) -> bool:
    """Whether oneDNN has a packed order and fast kernels for this weight."""
    if weight_NK.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight_NK.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight_NK.dtype == torch.float32
