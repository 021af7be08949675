"""Look up rows of a table, and encoder outputs: one program per token and 1024 columns.

Bound by memory: 2 D elements per token, 3 D where encoder outputs are added. Expected on an H200,
at 4.3 TB/s: 8 us for 2048 tokens of D = 4096 in bfloat16. A few tokens take the time of a launch.
Shape legend: T tokens, V rows of the table, D model dim, S slots, W numbers of a slot.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel

BLOCK = 1024


@kernel()
def _embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, num_rows, num_columns, num_blocks, row_stride, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    token = (program // num_blocks).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64)
    at = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_columns
    # Never read outside the table: a wrong id is the caller's bug and gives zeros.
    is_known = (row >= 0) & (row < num_rows)
    x = tl.load(weight_ptr + row * row_stride + at, mask=inside & is_known, other=0.0)
    tl.store(out_ptr + token * num_columns + at, x, mask=inside)


def embedding(ids_T: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Compute `quire.ops.embedding.embedding` with an unpacked table: rows [T, D]."""
    assert weight_VD.stride(1) == 1, f"columns must be contiguous, got {weight_VD.stride()}"
    ids_T = ids_T.contiguous()
    num_rows, num_columns = weight_VD.shape
    out_TD = weight_VD.new_empty(len(ids_T), num_columns)
    num_blocks = triton.cdiv(num_columns, BLOCK)
    if out_TD.numel():
        _embedding_kernel[(len(ids_T) * num_blocks,)](
            ids_T,
            weight_VD,
            out_TD,
            num_rows,
            num_columns,
            num_blocks,
            weight_VD.stride(0),
            BLOCK=BLOCK,
        )
    return out_TD


@kernel()
def _features_kernel(
    ids_ptr,
    x_ptr,
    memory_ptr,
    out_ptr,
    num_slots,
    num_columns,
    num_blocks,
    x_stride,
    width,
    offset,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    token = (program // num_blocks).to(tl.int64)
    slot = -1 - tl.load(ids_ptr + token).to(tl.int64)
    at = (program % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_columns
    # Never read outside the memory: a slot that does not exist gives zeros.
    is_read = inside & (slot >= 0) & (slot < num_slots)
    features = tl.load(memory_ptr + slot * width + offset + at, mask=is_read, other=0.0)
    x = tl.load(x_ptr + token * x_stride + at, mask=inside, other=0.0)
    features = features.to(x.dtype)
    out = tl.where(slot >= 0, x + features if ADDS else features, x)
    tl.store(out_ptr + token * num_columns + at, out, mask=inside)


def place(x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor) -> torch.Tensor:
    """Compute `quire.ops.embedding.place`: x [T, D] with encoder outputs in place of some rows."""
    return _with_features(x_TD, ids_T, memory_SW, 0, adds=False)


def add_features(
    x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor, offset: int
) -> torch.Tensor:
    """Compute `quire.ops.embedding.add_features`: x [T, D] plus encoder outputs in some rows."""
    return _with_features(x_TD, ids_T, memory_SW, offset, adds=True)


def _with_features(
    x_TD: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor, offset: int, *, adds: bool
) -> torch.Tensor:
    assert x_TD.stride(1) == 1 and memory_SW.is_contiguous(), "columns must be contiguous"
    num_tokens, num_columns = x_TD.shape
    num_slots, width = memory_SW.shape
    assert offset + num_columns <= width, "a slot holds the numbers that are read"
    out_TD = x_TD.new_empty(num_tokens, num_columns)
    num_blocks = triton.cdiv(num_columns, BLOCK)
    if out_TD.numel():
        _features_kernel[(num_tokens * num_blocks,)](
            ids_T.contiguous(),
            x_TD,
            memory_SW,
            out_TD,
            num_slots,
            num_columns,
            num_blocks,
            x_TD.stride(0),
            width,
            offset,
            ADDS=adds,
            BLOCK=BLOCK,
        )
    return out_TD


CONFIGS = [
    *(
        Config(
            _features_kernel,
            {
                "ids_ptr": "*i64",
                "x_ptr": "*bf16",
                "memory_ptr": "*fp32",
                "out_ptr": "*bf16",
                "num_slots": "i32",
                "num_columns": "i32",
                "num_blocks": "i32",
                "x_stride": "i32",
                "width": "i32",
                "offset": "i32",
            },
            {"ADDS": adds, "BLOCK": BLOCK},
            divisible=("num_columns", "x_stride", "width"),
        )
        for adds in (False, True)
    ),
    Config(
        _embedding_kernel,
        {
            "ids_ptr": "*i64",
            "weight_ptr": "*bf16",
            "out_ptr": "*bf16",
            "num_rows": "i32",
            "num_columns": "i32",
            "num_blocks": "i32",
            "row_stride": "i32",
        },
        {"BLOCK": BLOCK},
        divisible=("num_columns", "row_stride"),
    ),
]
