"""Piece `rivals`: attention by quire and by other libraries; one layer of Llama-3.1-8B's shape.

FlashInfer and FlashAttention 3 decode over the same pages, cuDNN (through torch) and FlashAttention
3 compute prompts without a prefix. A library that is not installed, or does not serve this device,
costs one line.
"""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.attention import BLOCK_SIZE, Shape, shape_of, time_paged
from benchmarks.gpu.context import Bench, Timing
from benchmarks.gpu.report import timed_row

Rows = list[tuple[int, int]]
Maker = Callable[[Bench, Shape, Rows], Callable[[], object]]
WORKSPACE_BYTES = 128 << 20


def pages(bench: Bench, shape: Shape, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return block tables [S, L], shuffled, and keys or values [B, 16, K, H] for them."""
    per_row = -(-rows[0][0] // BLOCK_SIZE)
    order = torch.randperm(per_row * len(rows), device=bench.device).to(torch.int32)
    cached = bench.randn(len(order), BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    return order.view(len(rows), per_row), cached


def flashinfer(bench: Bench, shape: Shape, rows: Rows) -> Callable[[], object]:
    """Return FlashInfer's decoding, planned."""
    library: Any = importlib.import_module("flashinfer")
    tables, keys = pages(bench, shape, rows)
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=bench.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    starts = torch.arange(len(rows) + 1, dtype=torch.int32) * tables.shape[1]
    last = torch.full((len(rows),), (rows[0][0] - 1) % BLOCK_SIZE + 1, dtype=torch.int32)
    wrapper.plan(
        starts, tables.flatten(), last, shape.num_heads, shape.num_kv_heads, shape.head_dim,
        BLOCK_SIZE, q_data_type=bench.dtype, kv_data_type=bench.dtype,
    )  # fmt: skip
    q = bench.randn(len(rows), shape.num_heads, shape.head_dim)
    return lambda: wrapper.run(q, (keys, keys))


def flash_attention_3(bench: Bench, shape: Shape, rows: Rows) -> Callable[[], object]:
    """Return FlashAttention 3: over pages while decoding, over dense tensors for a prompt."""
    library: Any = importlib.import_module("flash_attn_interface")
    context, new = rows[0]
    q = bench.randn(len(rows), new, shape.num_heads, shape.head_dim)
    if new > 1:
        k, v = (bench.randn(len(rows), new, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        return lambda: library.flash_attn_func(q, k, v, causal=True)
    tables, keys = pages(bench, shape, rows)
    lengths = torch.full((len(rows),), context, dtype=torch.int32, device=bench.device)
    return lambda: library.flash_attn_with_kvcache(
        q, keys, keys, cache_seqlens=lengths, page_table=tables, causal=True
    )


def by_torch(backend: SDPBackend) -> Maker:
    """Return the maker of torch's attention over dense tensors by one of its backends."""

    def make(bench: Bench, shape: Shape, rows: Rows) -> Callable[[], object]:
        new = rows[0][1]
        q = bench.randn(1, shape.num_heads, new, shape.head_dim)
        k, v = (bench.randn(1, shape.num_kv_heads, new, shape.head_dim) for _ in range(2))

        def call() -> torch.Tensor:
            with sdpa_kernel([backend]):
                return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return call

    return make


MODULES = {"flashinfer": "flashinfer", "flash_attention_3": "flash_attn_interface"}
DECODING: dict[str, Maker] = {"flashinfer": flashinfer, "flash_attention_3": flash_attention_3}
PROMPTS: dict[str, Maker] = {
    "flash_attention_3": flash_attention_3,
    "cudnn": by_torch(SDPBackend.CUDNN_ATTENTION),
    "torch's flash": by_torch(SDPBackend.FLASH_ATTENTION),
    "torch's plain": by_torch(SDPBackend.MATH),
}


def compare(bench: Bench, name: str, rows: Rows, makers: dict[str, Maker]) -> None:
    """Add our line, then each library's, with our time as a multiple of its time."""
    shape = shape_of(bench)
    cost = shape.cost(rows, bench.dtype.itemsize)
    ours = time_paged(bench, shape, rows)

    def add(library: str, took: Timing, detail: dict[str, str]) -> None:
        row = timed_row(f"{name}, {library}", took.cold_s, cost, bench.measured, detail=detail)
        bench.report.add(row)

    add("quire", ours, ours.detail)
    for library, make in makers.items():
        if bench.is_cuda and library == "torch's plain":
            continue
        try:
            took = bench.time(make(bench, shape, rows))
        except Exception as error:
            bench.report.skip(f"{name}, {library}", f"{type(error).__name__}: {error}"[:120])
            continue
        add(library, took, took.detail | {"quire": f"{ours.cold_s / took.cold_s:.2f} x"})


def run(bench: Bench) -> None:
    """Compare decoding by batch and context, and prompts."""
    pick = bench.pick
    absent = {name for name, module in MODULES.items() if find_spec(module) is None}
    for name in sorted(absent):
        bench.report.skip(name, "it is not installed")
    decoding, prompts = (
        {name: make for name, make in makers.items() if name not in absent}
        for makers in (DECODING, PROMPTS)
    )
    for batch, context in ((1, 512), (64, 512), (64, 4096), (256, 1024)):
        rows = [(pick(context, 32), 1)] * pick(batch, 2)
        name = f"decode {batch} x {context}"
        bench.attempt(name, lambda n=name, r=rows: compare(bench, n, r, decoding))
    for length in (2048, 8192):
        rows = [(pick(length, 32), pick(length, 32))]
        name = f"prompt of {length}"
        bench.attempt(name, lambda n=name, r=rows: compare(bench, n, r, prompts))
