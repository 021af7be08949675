"""Gates of feed-forward layers and of attention, one program per row and 1024 columns; and
soft-capping of logits, one program per 1024 logits.

Bound by memory: 3 F elements per token, in accesses of 16 bytes. Expected on an H200, at 4.3 TB/s:
41 us for 2048 tokens of F = 14336 in bfloat16. A few tokens take the time of a launch. Logits are
read and written once.
Shape legend: T tokens, F feed-forward dim, E = 2 F, M numbers of a token's heads, R rows, V
vocabulary.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel

BLOCK = 1024  # 16 bytes of gate and of up for each of 128 threads
SILU, GELU, GELU_TANH, CLAMPED = 0, 1, 2, 3


@triton.jit
def clamped_factors(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the two factors of a clamped gate. It clamps by comparisons, so that NaN stays NaN."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    return gate / (1.0 + tl.exp(-ALPHA * gate)), up


@triton.jit
def factors(gate, up, like_ptr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the two factors of a gate's result. As in the reference, an activated gate is rounded
    to the dtype that the pointer has."""
    if ACTIVATION == 1:
        gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif ACTIVATION == 2:
        # x (1 + tanh(u)) / 2 = x / (1 + e^(-2u))
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1.0 + tl.exp(-inner))
    elif ACTIVATION == 3:
        gate, up = clamped_factors(gate, up, ALPHA, LIMIT)
    else:
        gate = gate / (1.0 + tl.exp(-gate))
    if ACTIVATION != 3:
        gate = gate.to(like_ptr.dtype.element_ty).to(tl.float32)
    return gate, up


@kernel()
def _gate_kernel(
    gate_up_ptr,
    out_ptr,
    num_columns,
    num_blocks,
    token_stride,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    at = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_columns
    gate_ptr = gate_up_ptr + row * token_stride
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + num_columns + at, mask=inside, other=0.0).to(tl.float32)
    gate, up = factors(gate, up, out_ptr, ACTIVATION, ALPHA, LIMIT)
    out = (gate * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + at, out, mask=inside)


@kernel()
def _sigmoid_mul_kernel(
    x_ptr, gate_ptr, out_ptr, num_columns, num_blocks, x_stride, gate_stride, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    row = (program // num_blocks).to(tl.int64)
    at = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_columns
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    # As in the reference, the gate is rounded to the dtype before it is multiplied.
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(x_ptr.dtype.element_ty).to(tl.float32)
    out = (x.to(tl.float32) * gate).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + at, out, mask=inside)


@kernel()
def _soft_cap_kernel(x_ptr, out_ptr, num_elements, cap, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) / cap
    # Compute tanh by exponentials, or by the first terms of its series where they would cancel.
    power = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - power) / (1.0 + power)
    square = x * x
    series = 0.021869488536155203 * square - 0.05396825396825397
    series = (series * square + 0.13333333333333333) * square - 0.3333333333333333
    near = x + x * square * series
    result = tl.where(tl.abs(x) < 0.3, near, tl.where(x < 0.0, -far, far)) * cap
    tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """Compute `quire.ops.elementwise.silu_mul` for [T, 2 F] with contiguous columns."""
    return _gate(gate_up_TE, SILU)


def gelu_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """Compute `quire.ops.elementwise.gelu_mul` for [T, 2 F] with contiguous columns."""
    return _gate(gate_up_TE, GELU)


def gelu_tanh_mul(gate_up_TE: torch.Tensor) -> torch.Tensor:
    """Compute `quire.ops.elementwise.gelu_tanh_mul` for [T, 2 F] with contiguous columns."""
    return _gate(gate_up_TE, GELU_TANH)


def clamped_gate(gate_up_TE: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Compute `quire.ops.elementwise.clamped_gate` for [T, 2 F] with contiguous columns."""
    return _gate(gate_up_TE, CLAMPED, alpha, limit)


def sigmoid_mul(x_TM: torch.Tensor, gate_TM: torch.Tensor) -> torch.Tensor:
    """Compute `quire.ops.elementwise.sigmoid_mul` for x and gate [T, M] of one dtype. The stride
    between rows may exceed M."""
    num_tokens, num_columns = x_TM.shape
    assert gate_TM.shape == x_TM.shape and gate_TM.dtype == x_TM.dtype
    assert x_TM.stride(1) == gate_TM.stride(1) == 1, "columns must be contiguous"
    out_TM = x_TM.new_empty(num_tokens, num_columns)
    num_blocks = triton.cdiv(num_columns, BLOCK)
    if out_TM.numel():
        _sigmoid_mul_kernel[(num_tokens * num_blocks,)](
            x_TM,
            gate_TM,
            out_TM,
            num_columns,
            num_blocks,
            x_TM.stride(0),
            gate_TM.stride(0),
            BLOCK=BLOCK,
        )
    return out_TM


def soft_cap(x_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """Compute `quire.ops.elementwise.soft_cap` for logits [R, V]."""
    x_RV = x_RV.contiguous()
    out_RV = torch.empty_like(x_RV)
    if num_elements := x_RV.numel():
        programs = triton.cdiv(num_elements, BLOCK)
        _soft_cap_kernel[(programs,)](x_RV, out_RV, num_elements, cap, BLOCK=BLOCK)
    return out_RV


def _gate(
    gate_up_TE: torch.Tensor, activation: int, alpha: float = 1.0, limit: float = 0.0
) -> torch.Tensor:
    num_tokens, num_columns = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    assert gate_up_TE.stride(1) == 1, f"columns must be contiguous, got {gate_up_TE.stride()}"
    out_TF = gate_up_TE.new_empty(num_tokens, num_columns)
    num_blocks = triton.cdiv(num_columns, BLOCK)
    if out_TF.numel():
        _gate_kernel[(num_tokens * num_blocks,)](
            gate_up_TE,
            out_TF,
            num_columns,
            num_blocks,
            gate_up_TE.stride(0),
            ACTIVATION=activation,
            ALPHA=alpha,
            LIMIT=limit,
            BLOCK=BLOCK,
        )
    return out_TF


_GATE = {"num_columns": "i32", "num_blocks": "i32", "token_stride": "i32"}
_CAP = {"num_elements": "i32", "cap": "fp32"}
CONFIGS = (
    [
        Config(
            _gate_kernel,
            {"gate_up_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"} | _GATE,
            {"ACTIVATION": activation, "ALPHA": 1.702, "LIMIT": 7.0, "BLOCK": BLOCK},
            divisible=("num_columns", "token_stride"),
        )
        for dtype in ("bf16", "fp16", "fp32")
        for activation in (SILU, GELU, GELU_TANH, CLAMPED)
    ]
    + [
        Config(
            _sigmoid_mul_kernel,
            dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), f"*{dtype}")
            | dict.fromkeys(("num_columns", "num_blocks", "x_stride", "gate_stride"), "i32"),
            {"BLOCK": BLOCK},
            divisible=("num_columns", "x_stride", "gate_stride"),
        )
        for dtype in ("bf16", "fp16", "fp32")
    ]
    + [
        Config(
            _soft_cap_kernel,
            {"x_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"} | _CAP,
            {"BLOCK": BLOCK},
            divisible=("num_elements",),
        )
        for dtype in ("bf16", "fp16", "fp32")
    ]
)
