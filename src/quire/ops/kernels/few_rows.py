"""Multiply one to four rows with a plain 16-bit weight, x W^T + b, in one launch that reads it
once.

Shape legend: T tokens, I inputs, O outputs.

A program computes one or a few outputs from all inputs. Its steps over the inputs are unrolled, so
that it loads the weight while it adds. Products are exact in float32. They are summed element by
element, then across the elements at the end, and the result is rounded once. A matrix instruction
would leave most of its rows empty. For few outputs the library splits the inputs and adds the parts
in a second launch.

Measured on an NVIDIA H200, 2026-11-27, bfloat16, in microseconds (`reading`: the weight at 4.35
TB/s). The products ran one after another in a CUDA graph, each with its own weight:

    weight [O, I]                  rows   reading   library     here
    Qwen3-0.6B qkv   4096 x 1024   1, 2       1.9   4.9, 5.3    4.0, 4.8
               o     1024 x 2048   1, 2       1.0  12.0, 10.1   2.7, 3.1
               gate  6144 x 1024   1, 2       2.9   5.9, 6.0    4.9, 6.0
               down  1024 x 3072   1, 2       1.4   7.5, 7.5    3.6, 4.5
               o, down                 4           8.3, 7.6     3.7, 5.0
    1.7B       gate 12288 x 2048   1, 2      11.6  15.5, 15.9  13.7, 14.8
    4B         o     2560 x 4096   1, 2       4.8   9.8, 10.6   7.2, 8.9
    8B         qkv   6144 x 4096   1, 2      11.6  15.9, 16.0  14.0, 15.9
               o     4096 x 4096   1, 2       7.7  13.2, 13.4  10.0, 11.9
               gate 28672 x 4096   1, 2      54.0  59.7, 59.3  56.6, 58.6
               down 4096 x 14336   1, 2      27.0  32.8, 32.3  31.6, 34.2

Four rows with more outputs are left to the library (4B o 10.5 and 11.2, 8B o 13.5 and 15.7).

For one or two rows the kernel also computes the operations around a product (`normed`, `added`).
These are the RMS norm of x, from the x that it reads anyway, the gate, and the residual addition.
With `overlaps` a program loads its weight, which no kernel writes, before it waits for the kernel
before it. Not measured yet.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.kernels.gate import GELU, GELU_TANH, SILU, factors
from quire.ops.kernels.launch import DTYPES, Config, kernel, next_power_of_2, overlaps, pdl_option

MAX_ROWS = 4
MANY_ROWS = 3  # from this number on, only weights with few outputs
FEW_OUTPUTS = 2048  # with so few programs the library splits the inputs
# By number of rows. The library reads larger weights as fast, or faster.
MAX_WEIGHT_BYTES = (256 << 20, 64 << 20, 64 << 20, 64 << 20)

TILE = 2048  # numbers of the weight that a program reads per step; up to twice as many for two rows
NARROW_INPUTS, NARROW_STEPS = 1024, 8  # of a step; more steps would spill registers
MAX_STEPS = 16  # steps of TILE inputs
ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}
MAX_FUSED_ROWS = 2
MAX_FUSED_BYTES = 256 << 20  # a fused product saves a launch, so that two rows pay off here, too
MAX_NORMED_INPUTS = 8192  # more would spill registers
MAX_AHEAD_INPUTS = 16384  # of a weight that is held in registers
MIN_INPUTS, INPUTS_MULTIPLE = 256, 16  # for 16-byte loads in each row of the weight


def serves(x_TI: torch.Tensor, weight_OI: torch.Tensor) -> bool:
    """Return whether to use `few_rows` for x [T, I] and weight [O, I], by number of rows, dtypes
    and the weight's size."""
    if not _fits(x_TI, weight_OI, MAX_ROWS):
        return False
    if len(x_TI) >= MANY_ROWS and len(weight_OI) > FEW_OUTPUTS:
        return False
    max_bytes = MAX_WEIGHT_BYTES[len(x_TI) - 1]
    return weight_OI.nbytes <= max_bytes and weight_OI.shape[1] <= MAX_STEPS * TILE


def fuses(x_TI: torch.Tensor, weight_EI: torch.Tensor, has_norm: bool) -> bool:
    """Return whether to fuse the product of x [T, I] and weight [E, I] with the norm before it, or
    with the addition after it."""
    max_inputs = MAX_NORMED_INPUTS if has_norm else MAX_AHEAD_INPUTS
    is_small = weight_EI.nbytes <= MAX_FUSED_BYTES and weight_EI.shape[-1] <= max_inputs
    return is_small and _fits(x_TI, weight_EI, MAX_FUSED_ROWS)


def _fits(x_TI: torch.Tensor, weight_OI: torch.Tensor, max_rows: int) -> bool:
    """Return whether the kernel computes this product: of few rows, of 16 bits, aligned."""
    if x_TI.dim() != 2 or not 1 <= len(x_TI) <= max_rows or x_TI.dtype.itemsize != 2:
        return False
    if weight_OI.dim() != 2 or weight_OI.dtype != x_TI.dtype or not weight_OI.is_contiguous():
        return False
    num_outputs, num_inputs = weight_OI.shape
    return num_inputs >= MIN_INPUTS and num_inputs % INPUTS_MULTIPLE == 0 and num_outputs > 0


def step_tile(num_rows: int, num_inputs: int) -> tuple[int, int]:
    """Return a program's tile: outputs per program, and inputs per step of its loop."""
    is_narrow = num_inputs <= NARROW_STEPS * NARROW_INPUTS
    inputs = min(NARROW_INPUTS, next_power_of_2(num_inputs)) if is_narrow else TILE
    if num_rows == 2 and is_narrow:
        return 2 * TILE // inputs, inputs
    if num_inputs % TILE == 0:
        inputs = TILE
    return TILE // inputs, inputs


def normed_tile(num_inputs: int, num_parts: int) -> tuple[int, int]:
    """Return the tile of a program that normalises x: outputs, and inputs per step. Several rows of
    the weight share the work on x. num_parts: rows of the weight for each output."""
    rows = 4 if num_inputs <= 2 * NARROW_INPUTS else 2
    return rows // num_parts, min(NARROW_INPUTS, next_power_of_2(num_inputs))


@triton.jit
def _load(at, inside, IS_FULL: tl.constexpr):
    if IS_FULL:
        return tl.load(at)
    else:
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _load_parts(at, part_stride, inside, PARTS: tl.constexpr, IS_FULL: tl.constexpr):
    """Load a step of the weight's parts; return a tuple of them."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (_load(at + part * part_stride, inside, IS_FULL),)
    return parts


@triton.jit
def _biases(at, num_outputs, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Load the bias of each part, [N]; return a tuple of them."""
    biases = ()
    for part in tl.static_range(PARTS):
        bias = tl.zeros(at.shape, tl.float32)
        if HAS_BIAS:
            bias = tl.load(at + part * num_outputs).to(tl.float32)
        biases = biases + (bias,)
    return biases


@triton.jit
def _product(total, scale, bias, like_ptr):
    """Return scaled sums over the inputs, plus the bias, [N]. They are rounded to the dtype that
    the pointer has, and float32."""
    found = tl.sum(total, 1) * scale + bias
    return found.to(like_ptr.dtype.element_ty).to(tl.float32)


@kernel(do_not_specialize=["num_outputs"])
def _few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    residual_ptr,
    out_ptr,
    num_outputs,
    eps,
    ROWS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATE: tl.constexpr,  # activation of gate.py, or -1
    AHEAD: tl.constexpr,
):
    PARTS: tl.constexpr = 1 if GATE < 0 else 2  # gate and up
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Out-of-range outputs repeat the last one and are not stored.
    weight_rows = tl.minimum(outputs, num_outputs - 1).to(tl.int64)
    weight_at = weight_ptr + weight_rows[:, None] * INPUTS + depth[None, :]
    part_stride = num_outputs.to(tl.int64) * INPUTS
    biases = _biases(bias_ptr + weight_rows, num_outputs, PARTS, HAS_BIAS)
    ahead = ()  # parts of the weight's steps
    if AHEAD:
        # Results of earlier kernels must be read after the wait. They contain no weights.
        for start in tl.static_range(0, INPUTS, BLOCK_K):
            inside, IS_FULL = (start + depth < INPUTS)[None, :], start + BLOCK_K <= INPUTS
            ahead = ahead + (_load_parts(weight_at + start, part_stride, inside, PARTS, IS_FULL),)
        gdc_wait()
        gdc_launch_dependents()

    x_at = x_ptr + depth[None, :]
    stored = outputs < num_outputs
    totals, squares, residuals = (), (), ()  # of each row and part; of each row
    for row in tl.static_range(ROWS):
        residual = tl.zeros([BLOCK_N], tl.float32)
        if HAS_RESIDUAL:
            residual_at = residual_ptr + row * num_outputs + outputs
            residual = tl.load(residual_at, mask=stored, other=0.0).to(tl.float32)
        residuals = residuals + (residual,)
        squares = squares + (tl.zeros([1, BLOCK_K], tl.float32),)
        for _part in tl.static_range(PARTS):
            totals = totals + (tl.zeros([BLOCK_N, BLOCK_K], tl.float32),)
    for start in tl.static_range(0, INPUTS, BLOCK_K):
        inside, IS_FULL = (start + depth < INPUTS)[None, :], start + BLOCK_K <= INPUTS
        if AHEAD:
            weight = ahead[start // BLOCK_K]
        else:
            weight = _load_parts(weight_at + start, part_stride, inside, PARTS, IS_FULL)
        new_totals, new_squares = (), ()
        for row in tl.static_range(ROWS):
            x = _load(x_at + row * INPUTS + start, inside, IS_FULL).to(tl.float32)
            if HAS_NORM:
                new_squares = new_squares + (squares[row] + x * x,)
                x *= _load(norm_ptr + start + depth[None, :], inside, IS_FULL).to(tl.float32)
            for part in tl.static_range(PARTS):
                total = totals[row * PARTS + part] + weight[part].to(tl.float32) * x
                new_totals = new_totals + (total,)
        totals, squares = new_totals, new_squares

    for row in tl.static_range(ROWS):
        scale = tl.full([1], 1.0, tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(squares[row], 1) / INPUTS + eps)
        found = _product(totals[row * PARTS], scale, biases[0], out_ptr)
        if PARTS == 2:
            up = _product(totals[row * PARTS + 1], scale, biases[1], out_ptr)
            found, up = factors(found, up, out_ptr, GATE, 1.0, 0.0)
            found *= up
        found = (found + residuals[row]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * num_outputs + outputs, found, mask=stored)


def few_rows(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x W^T + b, [T, O] in x's dtype. The arguments must satisfy `serves`, but may be
    float32 too."""
    return _launch(x_TI, weight_OI, bias_O, weight_OI.shape[0])


def normed(
    x_TI: torch.Tensor,
    norm_I: torch.Tensor,
    eps: float,
    weight_EI: torch.Tensor,
    bias_E: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    """Compute `quire.ops.fused_linear.normed_linear`, [T, O]. With one of ACTIVATIONS, compute
    `normed_gate`, [T, E / 2]. The arguments must satisfy `fuses`, but may be float32 too."""
    assert x_TI.shape[1] <= MAX_NORMED_INPUTS and norm_I.shape == x_TI.shape[1:]
    outputs = weight_EI.shape[0] if activation is None else weight_EI.shape[0] // 2
    norm = norm_I.contiguous(), eps
    return _launch(x_TI, weight_EI, bias_E, outputs, norm=norm, activation=activation)


def added(
    x_TI: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    residual_TO: torch.Tensor,
) -> torch.Tensor:
    """Compute `quire.ops.fused_linear.linear_add`, [T, O]. The arguments must satisfy `fuses`, but
    may be float32 too."""
    assert residual_TO.shape == (len(x_TI), len(weight_OI))
    return _launch(x_TI, weight_OI, bias_O, len(weight_OI), residual_TO=residual_TO.contiguous())


def _launch(
    x_TI: torch.Tensor,
    weight_EI: torch.Tensor,
    bias_E: torch.Tensor | None,
    num_outputs: int,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    residual_TO: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    num_tokens, num_inputs = x_TI.shape
    assert 1 <= num_tokens <= MAX_ROWS and weight_EI.shape[1] == num_inputs
    assert num_inputs <= MAX_STEPS * TILE and weight_EI.is_contiguous()
    norm_I, eps = (weight_EI, 0.0) if norm is None else norm
    out_TO = x_TI.new_empty(num_tokens, num_outputs)
    constants = _constants(
        num_tokens,
        num_inputs,
        overlaps(x_TI.device),
        has_norm=norm is not None,
        has_residual=residual_TO is not None,
        activation=activation,
    )
    _few_rows_kernel[(triton.cdiv(num_outputs, constants["BLOCK_N"]),)](
        x_TI.contiguous(),
        weight_EI,
        weight_EI if bias_E is None else bias_E.contiguous(),
        norm_I,
        weight_EI if residual_TO is None else residual_TO,
        out_TO,
        num_outputs,
        eps,
        HAS_BIAS=bias_E is not None,
        **constants,
        **pdl_option(bool(constants["AHEAD"])),
    )
    return out_TO


def _constants(
    num_tokens: int,
    num_inputs: int,
    overlaps: bool = False,
    *,
    has_norm: bool = False,
    has_residual: bool = False,
    activation: str | None = None,
) -> dict[str, int]:
    outputs, inputs = step_tile(num_tokens, num_inputs)
    if has_norm:
        outputs, inputs = normed_tile(num_inputs, 1 if activation is None else 2)
    return {
        "ROWS": num_tokens,
        "INPUTS": num_inputs,
        "BLOCK_N": outputs,
        "BLOCK_K": inputs,
        "HAS_NORM": has_norm,
        "HAS_RESIDUAL": has_residual,
        "GATE": -1 if activation is None else ACTIVATIONS[activation],
        "AHEAD": overlaps and num_tokens <= MAX_FUSED_ROWS and num_inputs <= MAX_AHEAD_INPUTS,
    }


def _config(
    num_tokens: int, num_inputs: int, dtype: torch.dtype = torch.bfloat16, **fused: Any
) -> Config:
    names = ("x_ptr", "weight_ptr", "bias_ptr", "norm_ptr", "residual_ptr", "out_ptr")
    return Config(
        _few_rows_kernel,
        dict.fromkeys(names, f"*{DTYPES[dtype]}") | {"num_outputs": "i32", "eps": "fp32"},
        _constants(num_tokens, num_inputs, **fused) | {"HAS_BIAS": dtype == torch.float16},
    )


def _fused_configs(num_tokens: int, overlaps: bool) -> list[Config]:
    """List the fused products of Qwen3-0.6B, 4B and Llama-3.1-8B, and the largest ones."""
    shared = {"overlaps": overlaps}
    return [
        *(
            _config(num_tokens, inputs, **shared, has_norm=True, activation=activation)
            for inputs in (1024, 2560, 4096, MAX_NORMED_INPUTS)
            for activation in (None, "silu")
        ),
        _config(num_tokens, 2048, **shared, has_norm=True, activation="gelu_tanh"),
        *(
            _config(num_tokens, inputs, **shared, has_residual=True)
            for inputs in (2048, 3072, 4096, 14336, MAX_AHEAD_INPUTS)
        ),
    ]


# Inputs of Qwen3-0.6B (qkv, gate and up; o; down) and of 8B (qkv, o; down). Then sizes that use the
# maximum of registers, and sizes that are no multiple of a step.
CONFIGS = [
    *(_config(rows, inputs) for inputs in (1024, 2048, 3072, 4096, 14336) for rows in (4, 1, 2)),
    *(_config(4, steps - 16, torch.float16) for steps in (MAX_STEPS * TILE, 8192, 512)),
    *(each for rows in (1, 2) for each in _fused_configs(rows, overlaps=False)),
]
# The launches of `overlaps`, for GPUs of compute capability 9.0 or more.
OVERLAPPING = [each for rows in (1, 2) for each in _fused_configs(rows, overlaps=True)]
