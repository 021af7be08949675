"""Short convolution along each channel's sequence, then SiLU; and helpers of kernels over states.

`ops/attention/states.py` describes where states are stored. A program computes a tile of tokens of
one row and of channels. The first tile of a row reads the inputs before it from the row's state.
The program with the last token of a block writes the inputs before the next block as that block's
state. Device memory holds where a row starts and which of its blocks get a state, so the launch can
be captured. An output's bits do not depend on how its sequence is cut.

Bound by memory: 4 bytes per token and channel in 16 bits, and 8 (W - 1) bytes per channel of each
row. (Inputs are read W times, all but once from the nearest cache.) Expected on an H200, at 4.3
TB/s: 16 us for 2048 tokens of 8192 channels; 9 us for 64 rows of one token.

Shape legend: T tokens, C channels, W width of the convolution, S rows, L longest block table, P
tokens per block, B blocks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2

TOKENS, CHANNELS = 32, 128  # of a tile
FEW_TOKENS, MORE_CHANNELS = 4, 256  # of a tile if each row has one token
MIN_ROWS = 32  # minimum number of rows that kernels are compiled for


class StateStep(NamedTuple):
    """Device tensors of a step over a group of states. starts: [S + 1], first token of each row.
    contexts: [S], tokens of each row, new ones included. tables: [S, L], blocks whose states are
    read. stored: [S, L], blocks whose states are written, -1 for none."""

    starts: torch.Tensor
    contexts: torch.Tensor
    tables: torch.Tensor
    stored: torch.Tensor
    block_size: int

    @property
    def num_rows(self) -> int:
        return len(self.contexts)

    @property
    def width(self) -> int:
        """Number of rows that kernels are compiled for, a power of 2."""
        return max(MIN_ROWS, next_power_of_2(self.num_rows))


@triton.jit
def find_row(starts_ptr, num_rows, tile, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the row of a tile of tokens, and the tile's first token counted from the row's first.

    Row s has the tiles from starts[s] // TOKENS + s on. So T // TOKENS + S tiles suffice for any
    step; a row's tiles after its last token are empty.
    """
    rows = tl.arange(0, WIDTH)
    inside = rows < num_rows
    first = tl.load(starts_ptr + rows, mask=inside, other=0) // TOKENS + rows
    row = tl.sum((inside & (first <= tile)).to(tl.int32), axis=0) - 1
    return row, (tile - tl.load(starts_ptr + row) // TOKENS - row) * TOKENS


@triton.jit
def state_before(table_ptr, before, BLOCK_SIZE: tl.constexpr):
    """Return the block of the state after `before` tokens of a row, int64; -1 if there is none: all
    zeros."""
    return tl.load(table_ptr + (before - 1) // BLOCK_SIZE, mask=before > 0, other=-1).to(tl.int64)


@triton.jit
def _inputs(
    x_ptr, state_ptr, token, channel, inside, has_past, x_stride, WIDTH: tl.constexpr
):  # fmt: skip
    """Load inputs [tokens, channels] of a row whose token 0 is at x_ptr. Negative tokens are the
    WIDTH - 1 inputs in the state, or 0 if there is no past."""
    at = token[:, None].to(tl.int64) * x_stride + channel[None, :]
    x = tl.load(x_ptr + at, mask=inside & (token >= 0)[:, None], other=0.0).to(tl.float32)
    if has_past:
        past_at = channel[None, :] * (WIDTH - 1) + (token + (WIDTH - 1))[:, None]
        x += tl.load(state_ptr + past_at, mask=inside & (token < 0)[:, None], other=0.0)
    return x


@triton.jit
def _leave(
    x_ptr, state_ptr, to_ptr, channel, end, has_past, num_channels, x_stride,
    WIDTH: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """Write the state after token end - 1 of the row. It may overwrite the state that the row
    started from."""
    past_at = tl.arange(0, KEPT)
    inside = (past_at < WIDTH - 1)[:, None] & (channel < num_channels)[None, :]
    token = end - (WIDTH - 1) + past_at
    x = _inputs(x_ptr, state_ptr, token, channel, inside, has_past, x_stride, WIDTH)
    tl.debug_barrier()
    tl.store(to_ptr + channel[None, :] * (WIDTH - 1) + past_at[:, None], x, mask=inside)


@kernel(do_not_specialize=["num_rows", "table_stride"])
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    states_ptr,
    starts_ptr,
    contexts_ptr,
    tables_ptr,
    left_ptr,
    num_rows,
    num_channels,
    x_stride,
    state_size,
    table_stride,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    row, first = find_row(starts_ptr, num_rows, tl.program_id(1), TOKENS, ROWS)
    start = tl.load(starts_ptr + row).to(tl.int64)
    count = tl.load(starts_ptr + row + 1) - start.to(tl.int32)
    if first >= count:
        return
    before = tl.load(contexts_ptr + row) - count
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    left_ptr += row.to(tl.int64) * table_stride
    past = state_before(table_ptr, before, BLOCK_SIZE)
    state_ptr = states_ptr + past * state_size
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < num_channels
    token = first + tl.arange(0, TOKENS)
    inside = (token < count)[:, None] & is_channel[None, :]
    # Only the first tile, of at least WIDTH - 1 tokens, reads inputs before the row's tokens.
    has_past = (first == 0) & (past >= 0)
    x_ptr += start * x_stride
    made = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for w in tl.static_range(WIDTH):
        weight = tl.load(weight_ptr + channel * WIDTH + w, mask=is_channel, other=0.0)
        seen = token - (WIDTH - 1) + w
        x = _inputs(x_ptr, state_ptr, seen, channel, inside, has_past, x_stride, WIDTH)
        made += weight.to(tl.float32)[None, :] * x
    made = made / (1.0 + tl.exp(-made))
    at = (start + token)[:, None] * num_channels + channel[None, :]
    tl.store(out_ptr + at, made.to(out_ptr.dtype.element_ty), mask=inside)

    # The row's first block may hold the state that it started from. So the program that reads
    # that state writes this block, as its last action.
    last = tl.minimum(first + TOKENS, count)
    own = before // BLOCK_SIZE
    index = (before + last - 1) // BLOCK_SIZE
    while index > own:
        end = tl.minimum((index + 1) * BLOCK_SIZE - before, count)
        block = tl.load(left_ptr + index).to(tl.int64)
        if (end > first) & (end <= last) & (block >= 0):
            to_ptr = states_ptr + block * state_size
            _leave(
                x_ptr, state_ptr, to_ptr, channel, end, has_past, num_channels, x_stride, WIDTH,
                KEPT,
            )  # fmt: skip
        index = tl.where(end > first, index - 1, own)
    block = tl.load(left_ptr + own).to(tl.int64)
    if (first == 0) & (block >= 0):
        end = tl.minimum((own + 1) * BLOCK_SIZE - before, count)
        to_ptr = states_ptr + block * state_size
        _leave(
            x_ptr, state_ptr, to_ptr, channel, end, has_past, num_channels, x_stride, WIDTH, KEPT
        )


def convolve(
    x_TC: torch.Tensor, weight_CW: torch.Tensor, states_BZ: torch.Tensor, step: StateStep
) -> torch.Tensor:
    """Compute `AttentionBackend.convolve`; return [T, C], contiguous.

    x_TC: the stride between rows may exceed C. states_BZ: float32, of all blocks, each contiguous
    and beginning with the inputs before the next token.
    """
    (num_tokens, num_channels), width = x_TC.shape, weight_CW.shape[1]
    assert x_TC.stride(1) == 1 and weight_CW.is_contiguous() and states_BZ.stride(1) == 1
    assert states_BZ.dtype == torch.float32 and width > 1
    out_TC = x_TC.new_empty(num_tokens, num_channels)
    if num_tokens == 0:
        return out_TC
    tokens, channels = _tile(num_tokens > step.num_rows, width)
    grid = (triton.cdiv(num_channels, channels), num_tokens // tokens + step.num_rows)
    _convolve_kernel[grid](
        x_TC,
        weight_CW,
        out_TC,
        states_BZ,
        step.starts,
        step.contexts,
        step.tables,
        step.stored,
        step.num_rows,
        num_channels,
        x_TC.stride(0),
        states_BZ.stride(0),
        step.tables.stride(0),
        **_constants(width, step.block_size, step.width, tokens, channels),
        num_warps=4,
        enable_fp_fusion=False,  # so that an output's bits are the same in all tiles
    )
    return out_TC


def _tile(has_many: bool, width: int) -> tuple[int, int]:
    """Return a tile's tokens, at least as many as the state has inputs, and its channels."""
    tokens, channels = (TOKENS, CHANNELS) if has_many else (FEW_TOKENS, MORE_CHANNELS)
    return max(tokens, next_power_of_2(width - 1)), channels


def _constants(
    width: int, block_size: int, rows: int, tokens: int, channels: int
) -> dict[str, int]:
    return {
        "WIDTH": width,
        "KEPT": next_power_of_2(width - 1),
        "BLOCK_SIZE": block_size,
        "ROWS": rows,
        "TOKENS": tokens,
        "CHANNELS": channels,
    }


def _config(dtype: str, has_many: bool, rows: int) -> Config:
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}")
    pointers |= dict.fromkeys(("starts_ptr", "contexts_ptr", "tables_ptr", "left_ptr"), "*i32")
    sizes = ("num_rows", "num_channels", "x_stride", "state_size", "table_stride")
    return Config(
        _convolve_kernel,
        pointers | {"states_ptr": "*fp32"} | dict.fromkeys(sizes, "i32"),
        _constants(4, 16, rows, *_tile(has_many, 4)),
        divisible=("num_channels", "x_stride", "state_size"),
    )


CONFIGS = [
    _config("bf16", True, 32),
    _config("bf16", False, 256),
    _config("fp32", True, 1024),
]
