"""Weights of linear layers in the order in which the C++ core multiplies: opaque, made once.

Shape legend: K inputs, N outputs, U looked up rows. The layout is csrc/linear.h's; it depends on
the variant, the instruction set that is the fastest for the format here (kernel_choice.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from quire.base.errors import ConfigError
from quire.ops.formats import (
    FORMATS,
    GROUP_SIZES,
    ROUND_INPUTS,
    Quantization,
    chosen_variant,
    variants,
)
from quire.ops.host_memory import HugeMemory, aligned
from quire.ops.native import address, core, needed_core
from quire.ops.native_types import CoreWeight, WeightLayout
from quire.ops.opaque import OpaqueWeight
from quire.ops.stored_rows import StoredRows
from quire.ops.threads import num_threads

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
BLOCK_VALUES = 32
BLOCK_BYTES = {"int8": 34, "int4": 18}
VALUES_AT_ONCE = 1 << 18


@dataclass(frozen=True, eq=False)
class PackedWeight(OpaqueWeight):
    """[N, K] in a format, in the core's order. data: bytes."""

    data: torch.Tensor
    layout: WeightLayout

    @property
    def format(self) -> str:
        return FORMATS[self.layout.format]

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.outputs, self.layout.inputs

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def serves_look_up(self) -> bool:
        """Those of 4 bits are too coarse."""
        return self.format != "int4"

    @property
    def variant(self) -> str:
        return variants()[self.layout.variant]

    @cached_property
    def core(self) -> CoreWeight:
        """The weight as the core's functions take it, which does not keep this one alive."""
        return self.layout.at(address(self.data, torch.uint8), needed_core())

    def rows(self, ids_U: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows [U, K] of these outputs, int64, as they were stored."""
        out_UK = torch.empty(len(ids_U), self.shape[1], dtype=dtype)
        needed_core().linear_unpack_rows(
            address(out_UK, dtype),
            ELEMENTS[dtype],
            address(ids_U, torch.int64),
            len(ids_U),
            self.core,
        )
        return out_UK


def can_pack_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether the core multiplies activations of this dtype."""
    return device.type == "cpu" and dtype in ELEMENTS and core() is not None


def bytes_of(layout: WeightLayout) -> int:
    """Return what a packed weight takes."""
    core = needed_core()
    return core.linear_bytes(layout.at(0, core))


def pack(
    weight_NK: torch.Tensor,
    quantization: Quantization | None,
    variant: str | None = None,
    memory: HugeMemory | None = None,
) -> PackedWeight:
    """Pack a weight in the core's order, quantised if that is asked for. memory: where to put it.

    Raises ConfigError for weights that are not finite: they have no scale.
    """
    weight_NK = weight_NK.detach().contiguous()
    layout = _layout(tuple(weight_NK.shape), weight_NK.dtype, quantization, variant)
    if quantization is not None and not _is_finite(weight_NK):
        raise ConfigError(
            f"a weight of shape {list(weight_NK.shape)} holds values that are not finite, so it"
            f" cannot be quantised to {quantization.format}."
        )
    packed = PackedWeight(_empty(layout, memory), layout)
    needed_core().linear_pack(
        packed.data.data_ptr(),
        packed.core,
        address(weight_NK, weight_NK.dtype),
        ELEMENTS[weight_NK.dtype],
        quantization is not None and quantization.format == "int4",
        num_threads(),
    )
    return packed


def pack_blocks(
    blocks_NB: torch.Tensor, quantization: Quantization, memory: HugeMemory | None = None
) -> PackedWeight:
    """Pack rows of ggml's blocks, uint8 (BLOCK_BYTES each: a float16 scale and 32 integers), as an
    int8 or int4 weight with groups of 32. The integers stay as they are; scales become bfloat16,
    which changes them by at most 1 in 256."""
    outputs, row_bytes = blocks_NB.shape
    inputs = row_bytes // BLOCK_BYTES[quantization.format] * quantization.group_size
    assert quantization.group_size == BLOCK_VALUES
    layout = _layout((outputs, inputs), torch.float32, quantization, None)
    packed = PackedWeight(_empty(layout, memory), layout)
    blocks = address(blocks_NB, torch.uint8)
    needed_core().linear_pack_blocks(packed.data.data_ptr(), packed.core, blocks, num_threads())
    return packed


def pack_stored(rows: StoredRows, memory: HugeMemory | None = None) -> PackedWeight:
    """Pack a weight that a checkpoint quantised; its numbers stay what they are."""
    raise ConfigError(f"the core does not multiply weights stored as {type(rows).__name__}.")


def _is_finite(weight_NK: torch.Tensor) -> bool:
    """Tell whether all is finite, in parts: torch's test takes more memory than the weight."""
    rows = max(1, VALUES_AT_ONCE // weight_NK.shape[1])
    return all(part.isfinite().all() for part in weight_NK.split(rows))


def packed_view(data: torch.Tensor, numbers: Sequence[int]) -> PackedWeight:
    """Make a packed weight of memory that holds one. Raises ValueError for numbers that `pack`
    does not make here, or that ask for another size."""
    layout = WeightLayout(*map(int, numbers))
    if not 0 <= layout.format < len(FORMATS) or min(layout.outputs, layout.inputs) < 1:
        raise ValueError(f"there is no packed weight of {numbers}")
    format, groups = FORMATS[layout.format], {1}
    if format in ("int8", "int4"):
        per_output = aligned(layout.inputs, ROUND_INPUTS) if format == "int8" else 0
        groups = {*GROUP_SIZES, per_output} - {0}
    is_known = layout.group in groups
    is_known = is_known and layout.variant == variants().index(chosen_variant(format))
    if not is_known or len(data) != bytes_of(layout):
        raise ValueError(f"a packed weight of {numbers} is not what it should be")
    return PackedWeight(data, layout)


def _empty(layout: WeightLayout, memory: HugeMemory | None) -> torch.Tensor:
    num_bytes = bytes_of(layout)
    if memory is None:
        return torch.empty(num_bytes, dtype=torch.uint8)
    return memory.empty(num_bytes)


def _layout(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    quantization: Quantization | None,
    variant: str | None,
) -> WeightLayout:
    outputs, inputs = shape
    name = str(dtype).removeprefix("torch.") if quantization is None else quantization.format
    group = 1 if quantization is None else quantization.group_of(inputs)
    index = variants().index(variant or chosen_variant(name))
    return WeightLayout(FORMATS.index(name), index, outputs, inputs, group)
