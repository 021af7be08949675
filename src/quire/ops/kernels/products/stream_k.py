"""Multiply 5 to 64 rows with a plain 16-bit weight, x W^T + b, in one launch that reads it once.

Shape legend: T tokens, I inputs, O outputs, E = 2 O with a gate, else O, P programs.

With so few rows reading the weight is the limit. All multiprocessors must read equal parts of it,
but tiles of outputs rarely divide among them. So the steps of all tiles form one sequence, and each
program computes an equal part of it (stream-K). A step is BLOCK_K inputs of BLOCK_E rows. If there
are almost as many tiles as multiprocessors, each tile has equal parts (tiles.py).

A program stores its sums of a tile that it shares with others. The last of these programs
(`arrives_last`) adds the sums in the order of the inputs. It loads all but its own. So a result
depends on the shape and on the number of programs alone. The rows of x are the columns of the
matrix instruction, whose 64 rows are never empty then.

The weight of a gate has its gate rows first, then its up rows. A tile takes both of its outputs,
one after the other, and stores their product (`gated`).

Expected on an H200, not measured: 57 us for 64 rows and the gate and up projection of Llama-3.1-8B.
Reading this weight takes 54 us (benchmarks/gpu/time_model.py).
"""

import functools
import os

import torch
import triton
import triton.language as tl

from quire.ops import gpu
from quire.ops.kernels.few_rows import ACTIVATIONS
from quire.ops.kernels.gate import factors
from quire.ops.kernels.launch import (
    DTYPES,
    STREAM_K,
    Config,
    arrives_last,
    dot_dtype,
    kernel,
    overlaps,
    pdl_option,
    stages_that_fit,
    wait_if,
)
from quire.ops.kernels.products.tiles import BLOCK_K, MAX_ROWS, Tile, pays_off, schedule_for

MAX_TILES = 4096
MAX_STAGES = 6
MAX_BYTES = 227 << 10  # of shared memory, on Hopper


def _is_on() -> bool:
    """Return whether the products are used. Off by default, because no GPU has run them yet."""
    return os.environ.get(STREAM_K) == "1"


class _Counters:
    """Counters [MAX_TILES] of a device. All products share them, since they run one after another
    and leave zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: torch.Tensor | None = None

    def get(self) -> torch.Tensor | None:
        """Return the counters; None in a recording before they exist, since a recorded
        initialisation would not run at once."""
        is_recording = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self._made is None and not is_recording:
            self._made = torch.zeros(MAX_TILES, dtype=torch.int32, device=self._device)
        return self._made


@functools.cache
def _counters(device: torch.device) -> _Counters:
    return _Counters(device)


def serves(x_TI: torch.Tensor, weight_EI: torch.Tensor) -> bool:
    """Return whether to use `stream_k` or `gated` for x [T, I] and weight [E, I]."""
    if not _is_on() or x_TI.dim() != 2 or weight_EI.dim() != 2:
        return False
    is_16_bit = weight_EI.dtype == x_TI.dtype and x_TI.dtype.itemsize == 2
    if not is_16_bit or not weight_EI.is_contiguous() or weight_EI.shape[1] % BLOCK_K:
        return False
    # The first product of an engine has many rows, and is not recorded: it makes the counters.
    if _counters(x_TI.device).get() is None or len(weight_EI) > 128 * MAX_TILES:
        return False
    return pays_off(len(x_TI), weight_EI.numel())


@functools.cache
def _num_cores(device: torch.device) -> int:
    """Return the number of multiprocessors; few under Triton's interpreter."""
    found = gpu.gpu_of(device)
    return 5 if found is None else found.num_processors


@triton.jit
def _program_of(step, num_steps, num_programs):
    """Return the program that computes a step: the last one that begins at or before it."""
    return ((step + 1) * num_programs - 1) // num_steps


@triton.jit
def _store(
    total, tile, bias_ptr, out_ptr, num_tokens, num_outputs,
    ROWS: tl.constexpr, BLOCK_E: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Store a tile's outputs for its complete sums [BLOCK_E, ROWS]."""
    PARTS: tl.constexpr = 1 if GATE < 0 else 2
    OUTPUTS: tl.constexpr = BLOCK_E // PARTS
    e = tl.arange(0, BLOCK_E)
    if HAS_BIAS:
        output = tl.minimum(tile * OUTPUTS + e // PARTS, num_outputs - 1)
        bias = tl.load(bias_ptr + e % PARTS * num_outputs + output)
        total += bias.to(tl.float32)[:, None]
    found = total
    if GATE >= 0:
        pairs = tl.permute(tl.reshape(total, [OUTPUTS, 2, ROWS]), [0, 2, 1])
        gate, up = tl.split(pairs)
        # Rounded as by two operations.
        gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
        gate, up = factors(gate, up, out_ptr, GATE, 1.0, 0.0)
        found = gate * up
    outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    at = row.to(tl.int64)[None, :] * num_outputs + outputs[:, None]
    stored = (outputs < num_outputs)[:, None] & (row < num_tokens)[None, :]
    tl.store(out_ptr + at, found.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _sums_of(
    program, tile, partials_ptr, num_steps, num_programs, STEPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Load the sums [BLOCK_E, ROWS] of a tile that a program stored."""
    first_tile = program * num_steps // num_programs // STEPS
    slot = (2 * program + (first_tile != tile)).to(tl.int64) * BLOCK_E * ROWS
    e, row = tl.arange(0, BLOCK_E), tl.arange(0, ROWS)
    return tl.load(partials_ptr + slot + e[:, None] * ROWS + row[None, :])


@triton.jit
def _merge_shared(
    own, program, tile, partials_ptr, arrivals_ptr, bias_ptr, out_ptr, num_tokens, num_outputs,
    num_steps, num_programs, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
    HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Add the sums of a tile if this program is the last to store its sums. It still has its own
    sums, and loads the sums of the programs before it and after it."""
    first = _program_of(tile * STEPS, num_steps, num_programs)
    last = _program_of(tile * STEPS + STEPS - 1, num_steps, num_programs)
    if arrives_last(arrivals_ptr + tile, last - first + 1):
        total = tl.zeros([BLOCK_E, ROWS], tl.float32)
        for other in range(first, program):
            total += _sums_of(
                other, tile, partials_ptr, num_steps, num_programs, STEPS, ROWS, BLOCK_E
            )
        total += own
        for other in range(program + 1, last + 1):
            total += _sums_of(
                other, tile, partials_ptr, num_steps, num_programs, STEPS, ROWS, BLOCK_E
            )
        _store(
            total, tile, bias_ptr, out_ptr, num_tokens, num_outputs, ROWS, BLOCK_E, HAS_BIAS, GATE
        )


@kernel(do_not_specialize=["num_tokens"])
def _stream_k_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partials_ptr,
    arrivals_ptr,
    num_tokens,
    num_outputs,
    num_tiles,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATE: tl.constexpr,  # activation of gate.py, or -1
    DOT: tl.constexpr,
    AHEAD: tl.constexpr,
):
    wait_if(AHEAD)
    PARTS: tl.constexpr = 1 if GATE < 0 else 2  # gate and up
    STEPS: tl.constexpr = INPUTS // BLOCK_K  # of a tile
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_steps = num_tiles * STEPS
    begin = program * num_steps // num_programs
    end = (program + 1) * num_steps // num_programs
    first_tile = begin // STEPS
    e, depth, row = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K), tl.arange(0, ROWS)
    is_row = (row < num_tokens)[None, :]
    for tile in range(first_tile, tl.cdiv(end, STEPS)):
        start, stop = tl.maximum(begin - tile * STEPS, 0), tl.minimum(end - tile * STEPS, STEPS)
        # Out-of-range outputs repeat the last one and are not stored.
        output = tl.minimum(tile * (BLOCK_E // PARTS) + e // PARTS, num_outputs - 1)
        weight_row = (e % PARTS * num_outputs + output).to(tl.int64)
        weight_at = weight_ptr + weight_row[:, None] * INPUTS + depth[None, :]
        x_at = x_ptr + row[None, :] * INPUTS + depth[:, None]
        total = tl.zeros([BLOCK_E, ROWS], tl.float32)
        for step in range(start, stop):
            weight = tl.load(weight_at + step * BLOCK_K)
            x = tl.load(x_at + step * BLOCK_K, mask=is_row, other=0.0)
            total = tl.dot(weight.to(DOT), x.to(DOT), total)
        if stop - start == STEPS:
            _store(
                total, tile, bias_ptr, out_ptr, num_tokens, num_outputs, ROWS, BLOCK_E, HAS_BIAS,
                GATE,
            )  # fmt: skip
        else:
            slot = (2 * program + (tile != first_tile)).to(tl.int64) * BLOCK_E * ROWS
            tl.store(partials_ptr + slot + e[:, None] * ROWS + row[None, :], total)
            _merge_shared(
                total, program, tile, partials_ptr, arrivals_ptr, bias_ptr, out_ptr, num_tokens,
                num_outputs, num_steps, num_programs, STEPS, ROWS, BLOCK_E, HAS_BIAS, GATE,
            )  # fmt: skip


def stream_k(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b, [T, O] in x's dtype. The arguments must satisfy `serves`, but may be
    float32 too, and the weight may be small."""
    return _launch(x_TI, weight_OI, bias_O, len(weight_OI), -1)


def gated(
    x_TI: torch.Tensor, weight_EI: torch.Tensor, bias_E: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """Compute `quire.ops.fused_linear.linear_gate`, [T, O], for one of ACTIVATIONS. The arguments
    are as in `stream_k`."""
    return _launch(x_TI, weight_EI, bias_E, len(weight_EI) // 2, ACTIVATIONS[activation])


def _launch(
    x_TI: torch.Tensor,
    weight_EI: torch.Tensor,
    bias_E: torch.Tensor | None,
    num_outputs: int,
    gate: int,
) -> torch.Tensor:
    num_tokens, num_inputs = x_TI.shape
    assert 1 <= num_tokens <= MAX_ROWS and num_inputs % BLOCK_K == 0
    assert weight_EI.shape[1] == num_inputs and weight_EI.is_contiguous()
    cores = _num_cores(x_TI.device)
    schedule = schedule_for(num_tokens, len(weight_EI), num_inputs, cores)
    tile, programs = schedule.tile, schedule.num_programs
    num_tiles = triton.cdiv(len(weight_EI), tile.outputs)
    assert num_tiles <= MAX_TILES
    out_TO = x_TI.new_empty(num_tokens, num_outputs)
    arrivals = _counters(x_TI.device).get()
    assert arrivals is not None, "serves comes first"
    partials = torch.empty(
        2 * programs * tile.outputs * tile.rows, dtype=torch.float32, device=x_TI.device
    )
    _stream_k_kernel[(programs,)](
        x_TI.contiguous(),
        weight_EI,
        weight_EI if bias_E is None else bias_E.contiguous(),
        out_TO,
        partials,
        arrivals,
        num_tokens,
        num_outputs,
        num_tiles,
        **_constants(tile, num_inputs, gate),
        HAS_BIAS=bias_E is not None,
        DOT=dot_dtype(x_TI.dtype),
        AHEAD=overlaps(x_TI.device),
        num_warps=tile.num_warps,
        num_stages=stages_that_fit(MAX_STAGES, tile.stage_bytes, x_TI.device),
        **pdl_option(overlaps(x_TI.device)),
    )
    return out_TO


def _constants(tile: Tile, num_inputs: int, gate: int) -> dict[str, int]:
    return {
        "INPUTS": num_inputs,
        "ROWS": tile.rows,
        "BLOCK_E": tile.outputs,
        "BLOCK_K": BLOCK_K,
        "GATE": gate,
    }


def _config(
    num_tokens: int,
    weight: tuple[int, int],
    activation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    is_ahead: bool = False,
) -> Config:
    """Return a launch for a weight [E, I]."""
    outputs, inputs = weight
    tile, kind = schedule_for(num_tokens, outputs, inputs, 132).tile, DTYPES[dtype]
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "out_ptr"), f"*{kind}")
    pointers |= {"partials_ptr": "*fp32", "arrivals_ptr": "*i32"}
    gate = -1 if activation is None else ACTIVATIONS[activation]
    return Config(
        _stream_k_kernel,
        pointers | dict.fromkeys(("num_tokens", "num_outputs", "num_tiles"), "i32"),
        _constants(tile, inputs, gate)
        | {"HAS_BIAS": dtype == torch.float16, "DOT": kind, "AHEAD": is_ahead},
        num_warps=tile.num_warps,
        num_stages=min(MAX_STAGES, MAX_BYTES // tile.stage_bytes),
        divisible=("num_outputs",),
        needs_wgmma=True,
    )


# QKV, output, gate and down projections of Llama-3.1-8B, and the gate of Qwen3-0.6B.
CONFIGS = [
    _config(64, (28672, 4096), "silu"),
    _config(64, (4096, 14336)),
    _config(32, (6144, 4096), dtype=torch.float16),
    _config(32, (28672, 4096), "silu"),
    _config(16, (4096, 4096)),
    _config(8, (6144, 1024), "gelu_tanh"),
    _config(64, (28672, 4096), "gelu", torch.float16),
]
ARRIVING = CONFIGS[:1]
OVERLAPPING = [_config(64, (28672, 4096), "silu", is_ahead=True)]
