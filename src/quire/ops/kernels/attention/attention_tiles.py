"""Tiles, warps and pipeline stages of attention's launches, by device, head size and KV format.

A tile is rows of queries times keys of a loop step. Its sums and one operand lie in registers, so
its size is the largest that compiles without spilled registers (tests/kernels/test_aot.py).
"""

from dataclasses import dataclass, replace

import torch
import triton.language as tl

from quire.ops import gpu
from quire.ops.kernels.attention.attention_plan import Cut
from quire.ops.kernels.attention.attention_write import FORMATS
from quire.ops.kernels.launch import dot_dtype, next_power_of_2

TILE_BYTES = 16 << 10  # bytes of a loop step's keys, and as many of its values
NUM_WARPS, SHORT_WARPS = 8, 4  # of launches with long tiles, and without
FIXED_WARPS = 4  # of a fixed cut's tiles with up to FIXED_SUMS sums
FIXED_SUMS = 64 * 128
MAX_FIXED_TILE = 64
NUM_STAGES = 3
# Query heads per KV head times head size. Above it a program takes too many registers for three
# on a multiprocessor.
MAX_QUERIES_OF_THREE = 512
STAGES_BYTES = 160 << 10  # shared memory for NUM_STAGES; with less, one stage fewer
LATENT_WARPS = 8  # of all launches with latent vectors: their sums take as many registers
WARP_GROUPS = (9, 10)  # compute capabilities whose matrix instructions take 64 rows of four warps


@dataclass(frozen=True)
class Machine:
    """Launch limits of a device. num_programs: programs that run at once. num_stages: pipeline
    stages, one more than the key tiles being loaded. long_rows, long_warps: rows and warps of long
    tiles of heads of up to 128 numbers. has_warp_groups: see WARP_GROUPS."""

    num_programs: int
    num_stages: int = NUM_STAGES
    long_rows: int = 128
    long_warps: int = NUM_WARPS
    has_warp_groups: bool = True

    @property
    def with_small_tiles(self) -> "Machine":
        """Long tiles of half as many rows, of which a multiprocessor holds two at once."""
        return replace(self, long_rows=64, long_warps=SHORT_WARPS)

    def for_decoding(self, size: int, group_size: int) -> "Machine":
        """Return the limits of `rotary_attention` with heads of this size, and group_size query
        heads per KV head. A multiprocessor with warp groups has room for three of its programs with
        heads of 64 or 128 and few query heads."""
        is_small = size in (64, 128) and size * group_size <= MAX_QUERIES_OF_THREE
        fits = self.has_warp_groups and self.num_stages >= NUM_STAGES and is_small
        return replace(self, num_programs=self.num_programs * 3 // 2) if fits else self


HOPPER = Machine(2 * 132)


def machine_of(device: torch.device) -> Machine:
    """Return the launch limits of a device. Triton's interpreter gets few programs, so that each
    handles several items."""
    if (found := gpu.gpu_of(device)) is None:
        return Machine(3)
    has_space = found.shared_bytes >= STAGES_BYTES
    return machine_with(found.num_processors, found.capability[0] in WARP_GROUPS, has_space)


def machine_with(num_processors: int, has_warp_groups: bool, has_space: bool) -> Machine:
    """Return the launch limits by a device's properties. Without warp groups all operands are in
    registers, and 128 rows would spill some."""
    num_stages = NUM_STAGES if has_space else NUM_STAGES - 1
    rows = 128 if has_warp_groups else 64
    return Machine(2 * num_processors, num_stages, rows, has_warp_groups=has_warp_groups)


def num_warps(cut: Cut, size: int, kv_format: str, has_long: bool, machine: Machine) -> int:
    """Return the number of warps: few for short tiles. A fixed cut holds the sums of a chunk and of
    all chunks before it. More registers are needed for int8 keys and values, and to divide rows
    by a group that is not a power of 2."""
    sums = cut.short_rows * next_power_of_2(size)
    if kv_format == "int8" or cut.group_size != next_power_of_2(cut.group_size):
        sums *= 2
    if cut.is_fixed:
        return FIXED_WARPS if sums <= FIXED_SUMS and machine.has_warp_groups else NUM_WARPS
    if not has_long:
        return SHORT_WARPS
    is_usual = size <= 128 and cut.long_rows <= machine.long_rows
    return machine.long_warps if is_usual else NUM_WARPS


def _fixed_tile(cut: Cut, width: int, tile: int, kv_format: str) -> int:
    """Return the keys per loop step of a fixed cut: fewer than usual, since its sums take more
    registers."""
    is_large = width > 128 or kv_format == "int8"
    tile = min(tile, MAX_FIXED_TILE)
    return min(max(16, tile // 2) if is_large else tile, cut.align)


def constants(
    cut: Cut, dtype: torch.dtype, num_kv_heads: int, size: int, block_size: int, kv_format: str
) -> dict[str, object]:
    """Return the kernel's constants for layers of these heads. dtype: of queries. size: of a
    head."""
    width = max(16, next_power_of_2(size))
    tile = max(16, min(128, TILE_BYTES // (width * dtype.itemsize)))
    long_tile = tile // 2 if kv_format == "int8" else tile
    # e4m3 numbers are float16 numbers. To bfloat16 they would take one slow conversion each.
    is_float16 = kv_format == "fp8" and dtype.itemsize == 2
    if cut.is_fixed:
        tile = _fixed_tile(cut, width, tile, kv_format)
        long_tile = tile
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": cut.group_size,
        "HEAD_DIM": size,
        "WIDTH": width,
        "ROW": size + (4 if kv_format == "int8" else 0),
        "BLOCK_SIZE": block_size,
        "WINDOW": cut.window,
        "FORMAT": FORMATS[kv_format],
        "SHORT_ROWS": cut.short_rows,
        "LONG_ROWS": cut.long_rows,
        "SHORT_TILE": tile,
        "LONG_TILE": long_tile,
        "CHUNK": cut.fixed_chunk if cut.is_fixed else 0,
        "DOT": tl.float16 if is_float16 else dot_dtype(dtype),
    }


def latent_rows(machine: Machine, dtype: torch.dtype, kv_format: str) -> int:
    """Return the maximum rows of a tile of latent attention, whose sums of 512 values fit into
    registers. Stored numbers of 8 bits pass through registers too. dtype: of queries."""
    if dtype.itemsize == 4:
        return 16
    return 64 if machine.has_warp_groups and kv_format == "auto" else 32


def latent_stages(machine: Machine, dtype: torch.dtype) -> int:
    """Return the pipeline stages of latent attention; float32 takes twice the shared memory."""
    return machine.num_stages if dtype.itemsize < 4 else machine.num_stages - 1


def latent_constants(
    cut: Cut,
    dtype: torch.dtype,
    num_parts: int,
    size: int,
    num_values: int,
    block_size: int,
    kv_format: str,
    machine: Machine,
) -> dict[str, object]:
    """Return the constants of latent attention. size: elements of a latent vector, of which the
    first num_values are its value. num_parts: parts of the heads."""
    is_float16 = kv_format == "fp8" and dtype.itemsize == 2
    has_space = machine.num_stages >= NUM_STAGES and dtype.itemsize < 4
    return {
        "NUM_PARTS": num_parts,
        "GROUP": cut.group_size,
        "SIZE": size,
        "VALUES": num_values,
        "WIDTH": max(16, next_power_of_2(num_values)),
        "REST_WIDTH": max(16, next_power_of_2(size - num_values)),
        "ROW": size + (4 if kv_format == "int8" else 0),
        "BLOCK_SIZE": block_size,
        "FORMAT": FORMATS[kv_format],
        "TILE": min(32 if has_space else 16, cut.align),
        "CHUNK": cut.fixed_chunk if cut.is_fixed else 0,
        "DOT": tl.float16 if is_float16 else dot_dtype(dtype),
    }
