"""Move whole KV blocks: within a tensor, into one contiguous buffer, and out of one.

One launch moves all blocks in all layers and heads, keys and values together. A tensor of any dtype
is viewed as [lines, B, units], where B is the dimension that counts blocks. A block is one
contiguous piece of each line. KV tensors [2, Y, K, B, P, H] have 2 Y K lines. A program moves one
piece, or 8 KiB of it.

Bound by memory: 2 bytes for each byte of a block. Expected on an H200, at 4.3 TB/s: 1 us and the
launch to copy one block of Llama-3.1-8B (2 MiB). PCIe bounds moves to and from the host.
Shape legend: B blocks, N blocks that are moved, P tokens per block, H elements of a row.
"""

import math

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2

UNITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # types that blocks are moved as, by bytes
LARGEST = 2048  # maximum units of a program

Int32 = npt.NDArray[np.int32]


@kernel(
    do_not_specialize=["num_moved"],
    do_not_specialize_on_alignment=["source_ptr", "destination_ptr"],  # of odd numbers of blocks
)
def _move_kernel(
    from_ptr,
    to_ptr,
    source_ptr,
    destination_ptr,
    num_moved,
    from_line,  # units from one line to the next, and from one block to the next
    from_block,
    to_line,
    to_block,
    HAS_SOURCE: tl.constexpr,  # otherwise moved block i is read from index i
    HAS_DESTINATION: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Blocks vary faster than lines, since consecutive blocks are adjacent in memory.
    moved = tl.program_id(0) % num_moved
    line = (tl.program_id(0) // num_moved).to(tl.int64)
    source = moved.to(tl.int64)
    destination = source
    if HAS_SOURCE:
        source = tl.load(source_ptr + moved).to(tl.int64)
    if HAS_DESTINATION:
        destination = tl.load(destination_ptr + moved).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < NUM_UNITS
    units = tl.load(from_ptr + line * from_line + source * from_block + at, mask=inside)
    tl.store(to_ptr + line * to_line + destination * to_block + at, units, mask=inside)


def can_copy_at_once(source: Int32, destination: Int32) -> bool:
    """Return whether these copies may run in any order: no copy writes a block that another one
    reads or writes. source, destination: block ids [N] on the host.

    A plan may contain a conflict if a sequence is preempted after another sequence's copy of its
    block was planned. Gather and scatter handle it, because all reads precede the writes.
    """
    is_chain = bool(np.isin(destination, source).any())
    return not is_chain and len(np.unique(destination)) == len(destination)


def copy_blocks(kv: torch.Tensor, pairs_2N: torch.Tensor, dim: int = 3) -> None:
    """Copy block pairs[0, i] to block pairs[1, i], for all i and in any order.

    kv: contiguous; `dim` is its dimension of blocks. pairs_2N: int32 or int64, contiguous, on kv's
    device. No block may be both read and written, or written twice (`can_copy_at_once`).
    """
    units, lines, num_blocks, size = _as_units(kv, dim)
    source_N, destination_N = pairs_2N.unbind()
    strides = (num_blocks * size, size)
    _move(units, units, source_N, destination_N, pairs_2N.shape[1], lines, size, strides, strides)


def gather_blocks(
    kv: torch.Tensor, blocks_N: torch.Tensor, dim: int = 3, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return blocks of kv as contiguous [N, ...]: kv.index_select(dim, blocks).movedim(dim, 0).

    kv, dim, blocks_N: as in copy_blocks. out: contiguous tensor for the result; allocated if None.
    """
    units, lines, num_blocks, size = _as_units(kv, dim)
    num_moved = len(blocks_N)
    shape = (num_moved, *kv.shape[:dim], *kv.shape[dim + 1 :])
    if out is None:
        out = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    assert out.shape == shape and out.dtype == kv.dtype, f"needs {shape}, got {out.shape}"
    assert out.is_contiguous(), "gathered blocks are contiguous"
    to = out.view(-1).view(units.dtype)
    strides = (num_blocks * size, size), (size, lines * size)
    _move(units, to, blocks_N, None, num_moved, lines, size, *strides)
    return out


def scatter_blocks(
    kv: torch.Tensor, blocks_N: torch.Tensor, values: torch.Tensor, dim: int = 3
) -> None:
    """Write values from gather_blocks to blocks of kv. Block ids must be distinct.

    values: [N, ...], contiguous, on kv's device.
    """
    units, lines, num_blocks, size = _as_units(kv, dim)
    expected = (len(blocks_N), *kv.shape[:dim], *kv.shape[dim + 1 :])
    assert values.shape == expected, f"needs blocks of the shape {expected}, got {values.shape}"
    assert values.dtype == kv.dtype and values.is_contiguous(), "blocks must be as gathered"
    from_ = values.view(-1).view(units.dtype)
    strides = (size, lines * size), (num_blocks * size, size)
    _move(from_, units, None, blocks_N, len(blocks_N), lines, size, *strides)


def _as_units(kv: torch.Tensor, dim: int) -> tuple[torch.Tensor, int, int, int]:
    """Return the tensor as one row of units, its lines, its blocks, and a block's units per
    line."""
    assert kv.is_contiguous(), f"blocks must be contiguous, got {kv.stride()}"
    num_bytes = math.prod(kv.shape[dim + 1 :]) * kv.element_size()
    width = math.gcd(num_bytes, max(UNITS))
    units, num_lines = kv.view(-1).view(UNITS[width]), math.prod(kv.shape[:dim])
    return units, num_lines, kv.shape[dim], num_bytes // width


def _move(
    from_: torch.Tensor,
    to: torch.Tensor,
    source_N: torch.Tensor | None,
    destination_N: torch.Tensor | None,
    num_moved: int,
    num_lines: int,
    num_units: int,
    from_strides: tuple[int, int],
    to_strides: tuple[int, int],
) -> None:
    if num_moved * num_lines * num_units == 0:
        return
    for ids_N in (source_N, destination_N):
        assert ids_N is None or ids_N.is_contiguous(), "block ids must be contiguous"
    block = _block(num_units)
    _move_kernel[(num_moved * num_lines, triton.cdiv(num_units, block))](
        from_,
        to,
        to if source_N is None else source_N,
        to if destination_N is None else destination_N,
        num_moved,
        *from_strides,
        *to_strides,
        HAS_SOURCE=source_N is not None,
        HAS_DESTINATION=destination_N is not None,
        NUM_UNITS=num_units,
        BLOCK=block,
        num_warps=_num_warps(block),
    )


def _block(num_units: int) -> int:
    return min(LARGEST, next_power_of_2(num_units))


def _num_warps(block: int) -> int:
    """Return so many warps that each thread makes two accesses of 16 bytes."""
    return min(8, max(1, block // 256))


CONFIGS = [
    Config(
        _move_kernel,
        {
            "from_ptr": "*i32",
            "to_ptr": "*i32",
            "source_ptr": "*i32",
            "destination_ptr": "*i32",
            "num_moved": "i32",
            "from_line": "i32",
            "from_block": "i32",
            "to_line": "i32",
            "to_block": "i32",
        },
        {
            "HAS_SOURCE": has_source,
            "HAS_DESTINATION": has_destination,
            "NUM_UNITS": num_units,
            "BLOCK": _block(num_units),
        },
        num_warps=_num_warps(_block(num_units)),
        divisible=("from_line", "from_block", "to_line", "to_block"),
    )
    for has_source, has_destination in ((True, True), (True, False), (False, True))
    # Blocks of 16 tokens of 128 elements: 16 bits, int8 with scales; 64 tokens, 16 bits.
    for num_units in (1024, 528, 4096)
]
