"""RMS normalisation, alone or after a residual addition, with one program per row. Gated RMS
normalisation of heads has one program for several heads of a token.

Shape legend: T tokens, D the normalised dimension; N heads of E numbers.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel, next_power_of_2, overlaps, pdl_option, wait_if

TILE = 1024  # numbers of a gated norm's program, 8 for each of 128 threads


@kernel()
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    num_columns,
    weight_row,  # elements from one row's weight to the next; 0 if all rows share one
    rows_per_token,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < num_columns
    weight_at = (row % rows_per_token) * weight_row + at
    weight = tl.load(weight_ptr + weight_at, mask=inside, other=0.0).to(tl.float32)
    wait_if(AHEAD)
    x = tl.load(x_ptr + row * num_columns + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        before = tl.load(residual_ptr + row * num_columns + at, mask=inside, other=0.0)
        # As in the reference, the sum is rounded to the dtype before it is normalised.
        total = (x + before.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(total_ptr + row * num_columns + at, total, mask=inside)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + eps)
    y = x * scale * weight
    tl.store(out_ptr + row * num_columns + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `quire.ops.norms.rms_norm` for x [T, D] or [T, N, D], with weights [D] or [N, D]."""
    out_TD = torch.empty_like(x_TD)
    _launch(x_TD, None, weight_D, eps, out_TD, out_TD)
    return out_TD


def add_rms_norm(
    x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `quire.ops.norms.add_rms_norm`: the normalised sum and the sum, [T, D] each."""
    out_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    _launch(x_TD, residual_TD.contiguous(), weight_D, eps, out_TD, total_TD)
    return out_TD, total_TD


def _launch(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor | None,
    weight_D: torch.Tensor,
    eps: float,
    out_TD: torch.Tensor,
    total_TD: torch.Tensor,
) -> None:
    x_TD = x_TD.contiguous()
    num_columns = x_TD.shape[-1]
    num_rows = x_TD.numel() // num_columns
    per_token = 1 if weight_D.dim() == 1 else weight_D.shape[0]
    width = next_power_of_2(num_columns)
    _rms_norm_kernel[(num_rows,)](
        x_TD,
        x_TD if residual_TD is None else residual_TD,
        weight_D,
        out_TD,
        total_TD,
        num_columns,
        0 if weight_D.dim() == 1 else num_columns,
        per_token,
        eps,
        HAS_RESIDUAL=residual_TD is not None,
        WIDTH=width,
        AHEAD=overlaps(x_TD.device),
        num_warps=_num_warps(width),
        **pdl_option(overlaps(x_TD.device)),
    )


def _num_warps(width: int) -> int:
    return min(16, max(1, width // 512))


@kernel()
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    num_heads,
    num_columns,
    x_token,  # elements from one token to the next
    gate_token,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    tiles = tl.cdiv(num_heads, HEADS)
    token = (tl.program_id(0) // tiles).to(tl.int64)
    head = tl.program_id(0) % tiles * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, WIDTH)
    inside = (head < num_heads)[:, None] & (at < num_columns)[None, :]
    element_at = head[:, None] * num_columns + at[None, :]
    x = tl.load(x_ptr + token * x_token + element_at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_token + element_at, mask=inside, other=0.0).to(
        tl.float32
    )
    weight = tl.load(weight_ptr + at, mask=at < num_columns, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, axis=1) / num_columns + eps)[:, None]
    # As in the reference, round before the product, and after it if the weight has x's dtype.
    x = x.to(x_ptr.dtype.element_ty).to(tl.float32) * weight[None, :]
    if weight_ptr.dtype.element_ty == x_ptr.dtype.element_ty:
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    x *= gate / (1.0 + tl.exp(-gate))
    out = out_ptr + token * num_heads * num_columns + element_at
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(
    x_TNE: torch.Tensor, gate_TNE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> torch.Tensor:
    """Compute `quire.ops.norms.gated_norm`, [T, N, E]. A token's heads must follow each other; the
    stride between tokens is free."""
    num_tokens, num_heads, size = x_TNE.shape
    for each in (x_TNE, gate_TNE):
        assert each.stride()[1:] == (size, 1), f"heads must follow, got {each.stride()}"
    assert weight_E.is_contiguous()
    out_TNE = x_TNE.new_empty(x_TNE.shape)
    width = next_power_of_2(size)
    heads = _heads(width, num_heads)
    if out_TNE.numel():
        _gated_norm_kernel[(num_tokens * triton.cdiv(num_heads, heads),)](
            x_TNE,
            gate_TNE,
            weight_E,
            out_TNE,
            num_heads,
            size,
            x_TNE.stride(0),
            gate_TNE.stride(0),
            eps,
            HEADS=heads,
            WIDTH=width,
            num_warps=_gated_warps(heads, width),
        )
    return out_TNE


def _heads(width: int, num_heads: int) -> int:
    return min(max(1, TILE // width), next_power_of_2(num_heads))


def _gated_warps(heads: int, width: int) -> int:
    return min(16, max(1, heads * width // 256))


_SIGNATURE = {
    "x_ptr": "*bf16",
    "residual_ptr": "*bf16",
    "weight_ptr": "*bf16",
    "out_ptr": "*bf16",
    "total_ptr": "*bf16",
    "num_columns": "i32",
    "weight_row": "i32",
    "rows_per_token": "i32",
    "eps": "fp32",
}


def _config(width: int, has_residual: bool, is_ahead: bool = False) -> Config:
    return Config(
        _rms_norm_kernel,
        _SIGNATURE,
        {"HAS_RESIDUAL": has_residual, "WIDTH": width, "AHEAD": is_ahead},
        num_warps=_num_warps(width),
        divisible=("num_columns",),
    )


OVERLAPPING = [_config(4096, True, is_ahead=True)]
CONFIGS = [
    _config(width, has_residual)
    for width in (128, 1024, 4096, 8192)
    for has_residual in (False, True)
] + [
    Config(
        _gated_norm_kernel,
        dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), f"*{dtype}")
        | {"weight_ptr": f"*{weight}", "eps": "fp32"}
        | dict.fromkeys(("num_heads", "num_columns", "x_token", "gate_token"), "i32"),
        {"HEADS": _heads(128, 32), "WIDTH": 128},
        num_warps=_gated_warps(_heads(128, 32), 128),
        divisible=("num_columns", "x_token", "gate_token"),
    )
    for dtype, weight in (("bf16", "bf16"), ("bf16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32"))
]
