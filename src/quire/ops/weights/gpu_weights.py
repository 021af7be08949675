"""Quantised weights of linear layers and experts on a GPU: layout, packing and multiplication.

Shape legend: E experts, N outputs, K inputs, C chunks of inputs, W words of 32 bits of an output's
chunk, G groups of inputs that share a scale.

    codes   int32 [C, N, W]     a chunk has 4 planes (of 4 bits) or 2 (of 8) of 2 W inputs each
    scales  [G, N]              float32, or 16 bits where these hold all of them exactly; of MXFP4
                                uint8, its exponents
    zeros   [G, N]              int8 where all are whole, else float32; None where there are none

Weights of experts have one more dimension, which is the first. Word j of a chunk holds, in lanes of
16 bits, inputs 2 j and 2 j + 1 of each plane. Plane p is at bit p * 4 (or p * 8) of each lane. So
one shift and one mask extract two neighbours as the 16-bit operands of a matrix instruction, and
threads exchange no numbers. Within a chunk outputs are adjacent, so reads are contiguous.

Integers are stored with 8 or 128 added, e4m3 and e2m1 as their bits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from quire.base.errors import ConfigError
from quire.ops import gpu
from quire.ops.weights.formats import Quantization
from quire.ops.weights.gpu_layout import GPULayout, layout_of
from quire.ops.weights.opaque import OpaqueWeight
from quire.ops.weights.quantise import quantised
from quire.ops.weights.stored_rows import FLOAT4_BLOCK, Float4Rows, Float8Rows, StoredRows

BITS = {"int4": 4, "int8": 8, "fp8": 8, "mxfp4": 4}
VALUES_AT_ONCE = 1 << 24
FEW_ROWS = 128  # up to this number of rows, reading the weight takes longer than the product


@dataclass(frozen=True, eq=False)
class GPUWeight(OpaqueWeight):
    """Quantised weight in the layout above. num_inputs: K. order: int64 [K], as in IntegerRows.
    is_fixed: whether a row's bits must not depend on the number of rows."""

    format: str
    num_inputs: int
    layout: GPULayout
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    is_fixed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        *experts, _, outputs, _ = self.codes.shape
        return (*experts, outputs, self.num_inputs)

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scales, self.zeros, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def serves_look_up(self) -> bool:
        """Whether an embedding may look up rows; weights of 4 bits are too coarse for that."""
        return self.layout.bits == 8 and self.zeros is None and self.order is None

    def rows(self, ids_U: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        kernels = gpu.kernels_for(self.codes, "quantised_rows", any_dtype=True)
        assert kernels is not None
        found: torch.Tensor = kernels.look_up(ids_U, self, dtype)
        return found

    def fixed(self) -> "GPUWeight":
        """Return the same memory as a weight that is multiplied in one fixed order of sums."""
        return replace(self, is_fixed=True)


def multiply(
    x_TK: torch.Tensor, weight: GPUWeight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b, [T, N], in x's dtype. The kernel is in `kernels/quantised.py`, or for many
    rows with an fp8 weight in `kernels/fp8_matmul.py`."""
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    if weight.order is not None:
        x_TK = x_TK.index_select(1, weight.order)
    name = "fp8_matmul" if rounds_activations(x_TK, weight) else "quantised"
    kernels = gpu.kernels_for(x_TK, name)
    assert kernels is not None, f"no kernel for {weight.format} on {x_TK.device}"
    out_TN: torch.Tensor = kernels.matmul(x_TK, weight, bias_N)
    return out_TN


def rounds_activations(x_TK: torch.Tensor, weight: GPUWeight) -> bool:
    """Return whether the activations [T, K] are rounded to e4m3, too. They are for many rows on
    GPUs that multiply e4m3, which is twice as fast as 16 bits. Few rows would gain no time. With a
    fixed order of sums, results would depend on the number of rows."""
    if weight.format != "fp8" or weight.is_fixed or len(x_TK) <= FEW_ROWS:
        return False
    layout = weight.layout
    has_scales = layout.chunk_inputs == 128 and layout.group in (0, 128)
    return has_scales and x_TK.dtype.itemsize == 2 and multiplies_float8(x_TK.device)


def multiplies_float8(device: torch.device) -> bool:
    """Return whether the device's matrix instructions support e4m3 (capability 8.9 or more)."""
    return (found := gpu.gpu_of(device)) is not None and found.capability >= (8, 9)


# ---- packing ---------------------------------------------------------------------------------


def quantise_for_gpu(weight_NK: torch.Tensor, quantization: Quantization) -> GPUWeight:
    """Quantise a weight [N, K] on its GPU, and pack it. Raises ConfigError if it is not finite."""
    num_rows = max(1, VALUES_AT_ONCE // weight_NK.shape[1])
    parts = (quantised(part, quantization) for part in weight_NK.split(num_rows))
    return join_outputs([pack_for_gpu(part, weight_NK.device) for part in parts])


def pack_for_gpu(rows: StoredRows, device: torch.device) -> GPUWeight:
    """Put a quantised weight in the layout above, on the device; its numbers do not change.

    Raises ConfigError for groups without a kernel, and for e4m3 weights that contain NaN.
    """
    if isinstance(rows, Float4Rows):
        halves = rows.codes.to(device)
        codes_NK = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1)
        return _packed("mxfp4", codes_NK, rows.exponents.to(device), FLOAT4_BLOCK)
    scales = _narrowest(rows.scales.to(device))
    if isinstance(rows, Float8Rows):
        codes_NK = rows.values.view(torch.uint8).to(device)
        if bool(((codes_NK & 0x7F) == 0x7F).any()):
            raise ConfigError("a weight stored in e4m3 contains NaN.")
        return _packed("fp8", codes_NK, scales, rows.group_size)
    codes_NK = rows.integers.to(device).to(torch.int16).add_(1 << (rows.bits - 1))
    zeros = None if rows.zeros is None else _whole_if_possible(rows.zeros.to(device), rows.bits)
    order = None if rows.order is None else rows.order.to(device)
    format = f"int{rows.bits}"
    return _packed(format, codes_NK.to(torch.uint8), scales, rows.group_size, zeros, order)


def _packed(
    format: str,
    codes_NK: torch.Tensor,
    scales_NG: torch.Tensor,
    group_size: int,
    zeros_NG: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> GPUWeight:
    num_inputs = codes_NK.shape[1]
    layout = layout_of(BITS[format], group_size, num_inputs)
    return GPUWeight(
        format,
        num_inputs,
        layout,
        _words(codes_NK, layout),
        _of_groups(scales_NG, group_size, layout, num_inputs),
        None if zeros_NG is None else _of_groups(zeros_NG, group_size, layout, num_inputs),
        order,
    )


def _words(codes_NK: torch.Tensor, layout: GPULayout) -> torch.Tensor:
    """Pack codes [N, K], a byte each, into words [C, N, W]."""
    outputs, num_inputs = codes_NK.shape
    shape = (outputs, layout.num_chunks(num_inputs), layout.planes, layout.words, 2)
    made = torch.empty(shape[1], outputs, layout.words, dtype=torch.int32, device=codes_NK.device)
    num_rows = max(1, VALUES_AT_ONCE // num_inputs)
    for first in range(0, outputs, num_rows):
        part = codes_NK[first : first + num_rows]
        padded = torch.nn.functional.pad(part, (0, -num_inputs % layout.chunk_inputs))
        lanes = padded.view(len(part), *shape[1:]).int()
        words = torch.zeros_like(lanes[:, :, 0, :, 0])
        for plane in range(layout.planes):
            for lane in range(2):
                words |= lanes[:, :, plane, :, lane] << (plane * layout.bits + 16 * lane)
        made[:, first : first + num_rows] = words.transpose(0, 1)
    return made


def _of_groups(
    values_NG: torch.Tensor, group_size: int, layout: GPULayout, num_inputs: int
) -> torch.Tensor:
    """Return values [N, G] per stored group as [G, N] for the layout's groups."""
    if layout.group:
        values_NG = values_NG.repeat_interleave(group_size // layout.group, dim=1)
    count = layout.num_groups(num_inputs)
    values_NG = torch.nn.functional.pad(values_NG, (0, max(0, count - values_NG.shape[1])))
    return values_NG[:, :count].t().contiguous()


def _narrowest(values: torch.Tensor) -> torch.Tensor:
    """Convert values to 16 bits if that does not change any of them."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = values.to(dtype)
        if torch.equal(narrow.to(values.dtype), values):
            return narrow
    return values


def _whole_if_possible(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Convert zero points to int8 if they are whole and can be subtracted exactly in 16 bits, else
    to float32."""
    max_zero = 64 if bits == 4 else 127
    is_whole = (zeros == zeros.round()) & (zeros.abs() <= max_zero)
    return zeros.to(torch.int8) if bool(is_whole.all()) else zeros.float()


# ---- several weights in one ------------------------------------------------------------------


def join_outputs(parts: list[GPUWeight]) -> GPUWeight:
    """Concatenate the outputs of weights that differ only in their outputs."""
    return parts[0] if len(parts) == 1 else _joined(parts, torch.cat)


def stack_experts(experts: Iterable[GPUWeight]) -> GPUWeight:
    """Stack the weights of experts, of one kind and shape, to one weight [E, N, K].

    Raises ConfigError if a weight has sorted inputs.
    """
    parts = list(experts)
    if any(part.order is not None for part in parts):
        raise ConfigError("experts whose inputs were sorted (desc_act) have no kernel on a GPU.")
    return _joined(parts, lambda tensors, _: torch.stack(tensors))


def _joined(
    parts: list[GPUWeight], join: Callable[[list[torch.Tensor], int], torch.Tensor]
) -> GPUWeight:
    """Join the tensors of weights. join: takes the tensors and the dimension of their outputs."""
    first = parts[0]
    assert {(part.format, part.num_inputs, part.layout) for part in parts} == {
        (first.format, first.num_inputs, first.layout)
    }
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = join(_in_one_dtype([_zeros_of(part) for part in parts]), -1)
    return replace(
        first,
        codes=join([part.codes for part in parts], -2),
        scales=join(_in_one_dtype([part.scales for part in parts]), -1),
        zeros=zeros,
    )


def _zeros_of(part: GPUWeight) -> torch.Tensor:
    return torch.zeros_like(part.scales, dtype=torch.int8) if part.zeros is None else part.zeros


def _in_one_dtype(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Convert tensors to one dtype that holds the numbers of all of them."""
    dtypes = {tensor.dtype for tensor in tensors}
    return tensors if len(dtypes) == 1 else [tensor.float() for tensor in tensors]
