"""Packing of linear layers' weights into the order in which the C++ core multiplies (`packed.py`).

Inputs are plain numbers, which may be quantised here, rows that a checkpoint quantised, ggml's
blocks, or packed weights from a cache.

Shape legend: K inputs, N outputs, G groups of inputs, B bytes of an output's blocks.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from quire.base.errors import ConfigError
from quire.ops.host.host_memory import HugeMemory
from quire.ops.host.native import address, core, needed_core
from quire.ops.host.native_types import WeightLayout
from quire.ops.host.pages import aligned
from quire.ops.host.threads import num_threads
from quire.ops.weights.formats import (
    MAX_STORED_GROUP,
    NAMES,
    NESTED_INPUTS,
    ROUND_INPUTS,
    SIZES,
    Quantization,
    chosen_variant,
    packed_form,
    panel_of,
    rounds_activations,
    variant_numbers,
)
from quire.ops.weights.mapped_tensors import MappedTensors
from quire.ops.weights.packed import ELEMENTS, Packed, PackedParts, PackedWeight, variant_of
from quire.ops.weights.quantise import quantised
from quire.ops.weights.stored_rows import (
    FLOAT4_BLOCK,
    Float4Rows,
    Float8Rows,
    IntegerRows,
    StoredRows,
    stacked,
)

# Values and bytes of ggml's blocks, by the format in which they are packed.
BLOCKS = {
    "int8_f16": (32, 34), "int4_f16": (32, 18), "mxfp4": (32, 17), "q4_1": (32, 20),
    "q5_0": (32, 22), "q5_1": (32, 24), "q2_k": (256, 84), "q3_k": (256, 110),
    "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
}  # fmt: skip
WIDE_SCALE_BYTES = 4  # of a block of int8_f32, which GGUF lacks: a scale, then int8 of one group
VALUES_AT_ONCE = 1 << 18
FILE_ENDS, NOT_FINITE = -1, -2  # the core's reasons for not packing (csrc/linear.h)


def can_pack_natively(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the core multiplies activations of this dtype on the device."""
    return device.type == "cpu" and dtype in ELEMENTS and core() is not None


def bytes_of(layout: WeightLayout) -> int:
    """Return the bytes of a packed weight's data."""
    core = needed_core()
    return core.linear_bytes(layout.at(0, core))


def pack(
    weight_NK: torch.Tensor,
    quantization: Quantization | None,
    variant: str | None = None,
    memory: HugeMemory | None = None,
) -> PackedWeight:
    """Pack a weight [N, K] in the core's order, quantised if requested. memory: destination.

    Raises ConfigError if a weight to quantise is not finite, because it has no scale.
    """
    weight_NK = weight_NK.detach().contiguous()
    layout = _layout(tuple(weight_NK.shape), weight_NK.dtype, quantization, variant)
    if quantization is not None and quantization.format == "fp8":
        if not _is_finite(weight_NK):
            raise _not_quantisable(weight_NK, quantization)
        parts = weight_NK.split(max(1, VALUES_AT_ONCE // weight_NK.shape[1]))
        rows = stacked([quantised(part, quantization) for part in parts])
        return pack_stored(rows, memory, variant)
    packed = PackedWeight(_empty(bytes_of(layout), memory), layout)
    _pack_into(packed, weight_NK, quantization)
    return packed


def pack_parts(
    parts_NK: Sequence[torch.Tensor],
    dtype: torch.dtype,
    quantization: Quantization | None,
    memory: HugeMemory | None = None,
    mapped: MappedTensors | None = None,
) -> PackedWeight:
    """Pack a weight from parts [N, K] of its outputs, converted to `dtype`. If each part begins
    with a panel, they are not concatenated, and parts in `mapped` are read from their files. Raises
    ModelError if reading fails."""
    shape = (sum(map(len, parts_NK)), parts_NK[0].shape[1])
    layout = _layout(shape, dtype, quantization, None)
    panel = panel_of(variant_of(layout))
    is_float = quantization is not None and quantization.format == "fp8"
    if is_float or any(len(part) % panel for part in parts_NK[:-1]):
        converted = [part.to(dtype) for part in parts_NK]
        whole = converted[0] if len(converted) == 1 else torch.cat(converted)
        return pack(whole, quantization, memory=memory)
    packed, begin = PackedWeight(_empty(bytes_of(layout), memory), layout), 0
    for part in parts_NK:
        own = layout._replace(outputs=len(part))
        end = begin + bytes_of(own)
        piece = PackedWeight(packed.data[begin:end], own)
        _pack_into(piece, part.to(dtype).contiguous(), quantization, mapped)
        begin = end
    return packed


def _pack_into(
    packed: PackedWeight,
    weight_NK: torch.Tensor,
    quantization: Quantization | None,
    mapped: MappedTensors | None = None,
) -> None:
    """Pack a contiguous weight [N, K] into existing memory, from its file if it is in `mapped`."""
    data, element = packed.data.data_ptr(), ELEMENTS[weight_NK.dtype]
    search = quantization is not None and quantization.format == "int4"
    position = None if mapped is None else mapped.position(weight_NK)
    if position is None:
        weight = address(weight_NK, weight_NK.dtype)
        found = needed_core().linear_pack(data, packed.core, weight, element, search, num_threads())
    else:
        with position.reading() as file:
            found = needed_core().linear_pack_file(
                data, packed.core, file, position.offset, element, search, num_threads()
            )
            if found == FILE_ENDS:
                raise OSError("it ends too early")
            if found > 0:
                raise OSError(found, os.strerror(found))
    if found == NOT_FINITE:
        raise _not_quantisable(weight_NK, quantization)


def pack_blocks(
    blocks_NB: torch.Tensor,
    stretches: Sequence[tuple[int, Quantization]],
    memory: HugeMemory | None = None,
) -> Packed:
    """Pack rows of ggml's blocks or of int8_f32, uint8 [N, B]; their numbers do not change.
    stretches: (number of rows, format) of consecutive rows. Rows with smaller blocks do not fill
    all B bytes."""
    row_bytes = blocks_NB.shape[1]
    sizes_of = [_block_sizes(each) for _, each in stretches]
    inputs = min(row_bytes // num_bytes * values for values, num_bytes in sizes_of)
    layouts = [_layout_of(each.format, (n, inputs), each.group_size, None) for n, each in stretches]
    sizes = [aligned(bytes_of(layout)) for layout in layouts]
    data = _empty(sum(sizes), memory)
    packed, first = packed_parts(data, layouts), 0
    for part, (count, each) in zip(packed.parts, stretches, strict=True):
        if each.format in BLOCKS:
            blocks = address(blocks_NB, torch.uint8) + first * row_bytes
            needed_core().linear_pack_blocks(
                part.data.data_ptr(), part.core, blocks, row_bytes, num_threads()
            )
        else:
            num_bytes = block_row_bytes(each, inputs)
            _pack_wide_blocks(part, blocks_NB[first : first + count, :num_bytes], each.group_size)
        first += count
    return packed


def _pack_wide_blocks(packed: PackedWeight, blocks_NB: torch.Tensor, group: int) -> None:
    """Pack blocks of int8_f32 into existing memory."""
    blocks_NGB = blocks_NB.reshape(len(blocks_NB), -1, WIDE_SCALE_BYTES + group)
    scales_NG = blocks_NGB[..., :WIDE_SCALE_BYTES].contiguous().view(torch.float32)[..., 0]
    codes_NK = blocks_NGB[..., WIDE_SCALE_BYTES:].contiguous().view(torch.int8)
    _pack_arrays_into(packed, StoredArrays(codes_NK, torch.int8, scales_NG))


def packed_parts(data: torch.Tensor, layouts: Sequence[WeightLayout]) -> Packed:
    """Make a weight of one or several parts from bytes, uint8 [num_bytes]. Each part begins at a
    multiple of ALIGNMENT."""
    if len(layouts) == 1:
        return PackedWeight(data[: bytes_of(layouts[0])], layouts[0])
    parts, begin = [], 0
    for layout in layouts:
        num_bytes = bytes_of(layout)
        parts.append(PackedWeight(data[begin : begin + num_bytes], layout))
        begin += aligned(num_bytes)
    return PackedParts(data[:begin], tuple(parts))


def joined(parts: Sequence[PackedWeight], memory: HugeMemory | None = None) -> Packed:
    """Concatenate the outputs of weights with the same inputs, copying their data."""
    data = _empty(sum(aligned(part.nbytes) for part in parts), memory)
    made, begin = packed_parts(data, [part.layout for part in parts]), 0
    for part in parts:
        data[begin : begin + part.nbytes] = part.data
        begin += aligned(part.nbytes)
    return made


def block_row_bytes(format: Quantization, num_inputs: int) -> int:
    """Return the bytes of an output's blocks."""
    values, num_bytes = _block_sizes(format)
    return num_inputs // values * num_bytes


def _block_sizes(format: Quantization) -> tuple[int, int]:
    """Return the values and the bytes of a block."""
    is_wide = format.format not in BLOCKS
    size = format.group_size
    return (size, size + WIDE_SCALE_BYTES) if is_wide else BLOCKS[format.format]


def pack_stored(
    rows: StoredRows, memory: HugeMemory | None = None, variant: str | None = None
) -> PackedWeight:
    """Pack a weight that a checkpoint quantised; its numbers do not change.

    Raises ConfigError for groups that the core does not support, and for values that are not
    finite.
    """
    if isinstance(rows, IntegerRows):
        return _pack_integers(rows, memory, variant)
    if isinstance(rows, Float8Rows):
        return _pack_float8(rows, memory, variant)
    return _pack_float4(rows, memory, variant)


def _pack_integers(
    rows: IntegerRows, memory: HugeMemory | None, variant: str | None
) -> PackedWeight:
    inputs = rows.shape[1]
    group = stored_group(rows.group_size, inputs)
    _check_finite(rows.scales, rows.zeros)
    scales = _of_groups(rows.scales, rows.group_size, group, inputs)
    zeros = None
    if rows.zeros is not None and rows.zeros.any():
        zeros = _of_groups(rows.zeros, rows.group_size, group, inputs)
    arrays = StoredArrays(rows.integers, torch.int8, scales, zeros, rows.order)
    return _pack_arrays(integer_format(rows), rows.shape, group, arrays, memory, variant)


def _pack_float8(rows: Float8Rows, memory: HugeMemory | None, variant: str | None) -> PackedWeight:
    inputs = rows.shape[1]
    group = rows.group_size
    if group >= inputs:
        group = aligned(inputs, ROUND_INPUTS)
    elif group % ROUND_INPUTS:
        raise ConfigError(_no_group(group))
    codes = rows.values.view(torch.uint8)
    _check_finite(rows.scales)
    if ((codes & 0x7F) == 0x7F).any():
        raise ConfigError("an FP8 weight contains NaN.")
    scales = _of_groups(rows.scales, group, group, inputs)
    arrays = StoredArrays(codes, torch.uint8, scales)
    return _pack_arrays("fp8", rows.shape, group, arrays, memory, variant)


def _pack_float4(rows: Float4Rows, memory: HugeMemory | None, variant: str | None) -> PackedWeight:
    if (rows.exponents == 255).any():
        raise ConfigError("an MXFP4 weight has NaN scales.")
    arrays = StoredArrays(rows.codes, torch.uint8, rows.exponents)
    return _pack_arrays("mxfp4", rows.shape, FLOAT4_BLOCK, arrays, memory, variant)


def integer_format(rows: IntegerRows) -> str:
    """Return the smallest format that holds the scales and zero points exactly."""
    zeros = rows.zeros is not None and bool(rows.zeros.any())
    ending = "_zeros" if zeros else ""
    if not zeros or _is_exact(rows.zeros, torch.bfloat16):
        for kind, dtype in (("", torch.bfloat16), ("_f16", torch.float16)):
            if _is_exact(rows.scales, dtype):
                return f"int{rows.bits}{kind}{ending}"
    return f"int{rows.bits}_f32{ending}"


def stored_group(group_size: int, num_inputs: int) -> int:
    """Return the group size in which a checkpoint's groups are packed. It divides them, and is at
    most MAX_STORED_GROUP, since activations are rounded in the same groups. Raises
    ConfigError for a size that is not a multiple of ROUND_INPUTS."""
    if group_size >= num_inputs:
        return min(aligned(num_inputs, ROUND_INPUTS), MAX_STORED_GROUP)
    sizes = range(MAX_STORED_GROUP, 0, -ROUND_INPUTS)
    found = next((size for size in sizes if group_size % size == 0), None)
    if found is None:
        raise ConfigError(_no_group(group_size))
    return found


def _no_group(size: int) -> str:
    return (
        f"groups of {size} inputs cannot be multiplied; the core needs multiples of {ROUND_INPUTS}."
    )


def _of_groups(values_NG: torch.Tensor, size: int, group: int, num_inputs: int) -> torch.Tensor:
    """Return values per group of `size` inputs as values per group of `group` inputs, a divisor."""
    count = -(-num_inputs // group)
    if values_NG.shape[1] == 1:
        return values_NG.expand(-1, count).contiguous()
    return values_NG.repeat_interleave(size // group, dim=1)[:, :count].contiguous()


def _is_exact(values: torch.Tensor | None, dtype: torch.dtype) -> bool:
    return values is not None and bool((values.to(dtype).float() == values).all())


def _check_finite(*parts: torch.Tensor | None) -> None:
    if not all(part is None or bool(part.isfinite().all()) for part in parts):
        raise ConfigError("a quantised weight has scales or zero points that are not finite.")


class StoredArrays(NamedTuple):
    """Arguments of the core's linear_pack_stored. dtype: dtype of the values."""

    values: torch.Tensor
    dtype: torch.dtype
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None


def _pack_arrays(
    format: str,
    shape: tuple[int, int],
    group: int,
    arrays: StoredArrays,
    memory: HugeMemory | None,
    variant: str | None,
) -> PackedWeight:
    layout = _layout_of(format, shape, group, variant, int(arrays.order is not None))
    packed = PackedWeight(_empty(bytes_of(layout), memory), layout)
    _pack_arrays_into(packed, arrays)
    return packed


def _pack_arrays_into(packed: PackedWeight, arrays: StoredArrays) -> None:
    values, scales = arrays.values.contiguous(), arrays.scales.contiguous()
    order = None if arrays.order is None else arrays.order.contiguous()
    needed_core().linear_pack_stored(
        packed.data.data_ptr(),
        packed.core,
        address(values, arrays.dtype),
        address(scales, scales.dtype),
        0 if arrays.zeros is None else address(arrays.zeros, torch.float32),
        0 if order is None else address(order, torch.int64),
        num_threads(),
    )


def _layout_of(
    format: str, shape: tuple[int, int], group: int, variant: str | None, is_ordered: int = 0
) -> WeightLayout:
    number = variant_numbers()[variant or chosen_variant(format)]
    return WeightLayout(NAMES.index(format), number, *shape, group, is_ordered)


def _not_quantisable(weight_NK: torch.Tensor, quantization: Quantization | None) -> ConfigError:
    assert quantization is not None
    return ConfigError(
        f"a weight of shape {list(weight_NK.shape)} holds values that are not finite, so it"
        f" cannot be quantised to {quantization.format}."
    )


def _is_finite(weight_NK: torch.Tensor) -> bool:
    """Return whether all values are finite, testing parts to save memory."""
    rows = max(1, VALUES_AT_ONCE // weight_NK.shape[1])
    return all(part.isfinite().all() for part in weight_NK.split(rows))


def packed_view(data: torch.Tensor, numbers: Sequence[Sequence[int]]) -> Packed:
    """Make a packed weight from its bytes, uint8 [num_bytes]. numbers: the layout of each part.
    Raises ValueError for a layout that packing does not produce here, or of another size."""
    layouts = [known_layout(each) for each in numbers]
    sizes = [bytes_of(layout) for layout in layouts]
    total = sizes[0] if len(sizes) == 1 else sum(map(aligned, sizes))
    if len(data) != total or len({layout.inputs for layout in layouts}) != 1:
        raise ValueError(f"a packed weight of {numbers} is not what it should be")
    return packed_parts(data, layouts)


def known_layout(numbers: Sequence[int]) -> WeightLayout:
    """Return a layout from its numbers. Raises ValueError if packing does not produce it here."""
    layout = WeightLayout(*map(int, numbers))
    if not 0 <= layout.format < len(NAMES) or min(layout.outputs, layout.inputs) < 1:
        raise ValueError(f"there is no packed weight of {numbers}")
    format = NAMES[layout.format]
    is_known = layout.is_ordered in (0, 1) and _has_group(format, layout)
    is_known = is_known and layout.variant == variant_numbers()[chosen_variant(format)]
    if not is_known:
        raise ValueError(f"a packed weight of {numbers} is not what it should be")
    return layout


def _has_group(format: str, layout: WeightLayout) -> bool:
    """Return whether weights of a format are packed with this group size here."""
    sizes, group = SIZES[format], layout.group
    if not sizes.factor_bytes:
        return group == 1
    if sizes.group:
        filled = NESTED_INPUTS if sizes.block_bytes else 1
        return group == sizes.group and layout.inputs % filled == 0
    max_group = MAX_STORED_GROUP if rounds_activations(format) else layout.inputs
    if format in ("int8", "fp8") and group == aligned(layout.inputs, ROUND_INPUTS):
        return True
    return 0 < group <= max_group and group % ROUND_INPUTS == 0


def _empty(num_bytes: int, memory: HugeMemory | None) -> torch.Tensor:
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
    if quantization is None:
        return _layout_of(str(dtype).removeprefix("torch."), (outputs, inputs), 1, variant)
    form = packed_form(quantization)
    return _layout_of(form.format, (outputs, inputs), form.group_of(inputs), variant)
