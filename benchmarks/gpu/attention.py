"""Pieces `attention` and `paged`: one layer's attention of Llama-3.1-8B's shape, alone.

Shape legend: B rows, K KV heads, G query heads of each, C context, H head dim.

    attention  decoding by batch and context, in all KV formats; prompts; both in one launch
    paged      the same rows as torch's attention over dense tensors (P fig. 18a: paged was 20 to
               26 % slower), and with blocks in order against shuffled
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.context import Bench, Timing
from benchmarks.gpu.floors import Cost, attention_flops, seen_pairs
from benchmarks.gpu.report import timed_row
from quire.ops.attention.base import KVLayout
from quire.ops.attention.triton_gpu import TritonBackend
from quire.ops.attention_inputs import AttentionStep, Scores
from quire.spec.cache_group import CacheGroup

BLOCK_SIZE = 16
DECODE_SHARE = 0.88  # of the bandwidth, what decoding is to reach
PAGED_RATIO = 1.2  # maximum cost of paging, relative to dense tensors
STORED_BYTES = {"auto": 2.0, "int8": 1 + 4 / 128, "fp8": 1.0}  # a number of a head of 128


@dataclass(frozen=True)
class Shape:
    """Of one layer. kv_format: how keys and values are stored."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    kv_format: str = "auto"

    def cost(self, rows: Sequence[tuple[int, int]], itemsize: int) -> Cost:
        """Return the cost of rows (context, new tokens): keys and values once, queries and results
        once."""
        tokens = sum(new for _, new in rows)
        width = itemsize if self.kv_format == "auto" else STORED_BYTES[self.kv_format]
        kv = 2 * sum(context for context, _ in rows) * self.num_kv_heads * self.head_dim * width
        pairs = sum(seen_pairs(context, new) for context, new in rows)
        return Cost(
            num_bytes=kv + 2 * tokens * self.num_heads * self.head_dim * itemsize,
            flops=attention_flops(pairs, self.num_heads, self.head_dim),
        )


LLAMA = Shape()
TINY = Shape(num_heads=4, num_kv_heads=2, head_dim=16)


def paged_step(
    rows: Sequence[tuple[int, int]], device: torch.device, shuffled: bool = True, seed: int = 0
) -> tuple[AttentionStep, int]:
    """Return a step over rows (context, new tokens) and its number of blocks, which lie in order or
    shuffled."""
    counts = [-(-context // BLOCK_SIZE) for context, _ in rows]
    total = sum(counts)
    ids = np.arange(total, dtype=np.int32)
    if shuffled:
        np.random.default_rng(seed).shuffle(ids)
    tables = np.zeros((len(rows), max(counts)), np.int32)
    at, positions, slots = 0, [], []
    for i, ((context, new), count) in enumerate(zip(rows, counts, strict=True)):
        tables[i, :count] = ids[at : at + count]
        at += count
        position = np.arange(context - new, context)
        positions.append(position)
        slots.append(
            tables[i, position // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        )
    news = np.array([new for _, new in rows], np.int32)
    contexts = np.array([context for context, _ in rows], np.int32)
    starts = np.concatenate(([0], np.cumsum(news))).astype(np.int32)
    step = AttentionStep(
        positions_T=torch.from_numpy(np.concatenate(positions)).to(device),
        query_starts_S1=torch.from_numpy(starts).to(device),
        context_lens_S=torch.from_numpy(contexts).to(device),
        slots_T=(torch.from_numpy(np.concatenate(slots)).to(device),),
        block_tables_SL=(torch.from_numpy(tables).to(device),),
        query_lens_host=news,
        context_lens_host=contexts,
    )
    return step, total


def filled_backend(
    bench: Bench, shape: Shape, num_blocks: int, merges_last: bool = False
) -> TritonBackend:
    """Return a backend of one layer, with all blocks filled with normal numbers."""
    group = CacheGroup("full", (0,), shape.num_kv_heads, shape.head_dim)
    layout = KVLayout(
        (group,), (num_blocks,), BLOCK_SIZE, bench.dtype, bench.device, shape.kv_format, (1,)
    )
    backend = TritonBackend(layout, merges_last=merges_last)
    part = 1 << 16  # tokens written at a time
    num_tokens = num_blocks * BLOCK_SIZE
    numbers = bench.randn(min(part, num_tokens), shape.num_kv_heads, shape.head_dim)
    step, _ = paged_step([(num_tokens, 1)], bench.device)
    for first in range(0, num_tokens, part):
        slots = torch.arange(first, min(first + part, num_tokens), device=bench.device)
        backend.prepare(replace(step, slots_T=(slots,)))
        backend.write(0, numbers[: len(slots)], numbers[: len(slots)].flip(0))
    return backend


def time_paged(
    bench: Bench,
    shape: Shape,
    rows: Sequence[tuple[int, int]],
    shuffled: bool = True,
    merges_last: bool = False,
) -> Timing:
    """Time one layer's attention after its work was divided. merges_last: merge parts without a
    launch of its own."""
    step, num_blocks = paged_step(rows, bench.device, shuffled)
    backend = filled_backend(bench, shape, num_blocks, merges_last)
    q = bench.randn(sum(new for _, new in rows), shape.num_heads, shape.head_dim)
    backend.prepare(step)
    return bench.time(lambda: backend.run(0, q, Scores(shape.head_dim**-0.5)))


def add_case(
    bench: Bench,
    name: str,
    rows: Sequence[tuple[int, int]],
    shape: Shape,
    min_share: float | None = None,
    merges_last: bool = False,
) -> None:
    """Add one row to a table."""

    def measure() -> None:
        took = time_paged(bench, shape, rows, merges_last=merges_last)
        cost = shape.cost(rows, bench.dtype.itemsize)
        bench.report.add(
            timed_row(
                name, took.cold_s, cost, bench.measured, min_share=min_share, detail=took.detail
            )
        )

    bench.attempt(name, measure)


def shape_of(bench: Bench, **changes: Any) -> Shape:
    return replace(TINY if bench.is_tiny else LLAMA, **changes)


def run(bench: Bench) -> None:
    """Run piece `attention`; the aim first."""
    shape, pick = shape_of(bench), bench.pick
    add_case(bench, "decode 64 x 4096", [(pick(4096, 40), 1)] * pick(64, 3), shape, DECODE_SHARE)
    for context in (512, 2048):
        for name, merges_last in (("two launches", False), ("merged in one", True)):
            rows = [(pick(context, 70), 1)]
            add_case(bench, f"decode 1 x {context}, {name}", rows, shape, merges_last=merges_last)
    prompt = pick(2048, 40)
    for length in (2048, 1040, 8192):
        rows = [(pick(length, 40), pick(length, 40))]
        add_case(bench, f"prompt of {length}", rows, shape)
    add_case(bench, "4 prompts of 2048", [(prompt, prompt)] * pick(4, 2), shape)
    add_case(bench, "chunk, 2048 after 6144", [(4 * prompt, prompt)], shape)
    mixed = [(pick(4096, 40), 1)] * pick(63, 2) + [(pick(1985, 24), pick(1985, 24))]
    add_case(bench, "63 x decode 4096, prompt of 1985", mixed, shape)
    for kv_format in ("fp8", "int8"):
        if bench.is_tiny and kv_format == "fp8":
            continue  # the interpreter is slow with it
        changed = shape_of(bench, kv_format=kv_format)
        add_case(
            bench, f"decode 64 x 4096, {kv_format}", [(pick(4096, 40), 1)] * pick(64, 3), changed
        )
    for batch in (1, 4, 16, 32, 128, 256):
        if not bench.is_tiny or batch < 16:
            add_case(bench, f"decode {batch} x 2048", [(pick(2048, 33), 1)] * batch, shape)
    for context in (512, 1024, 16384):
        add_case(bench, f"decode 64 x {context}", [(pick(context, 20), 1)] * pick(64, 2), shape)
    many_heads = shape_of(bench, num_heads=pick(64, 8), num_kv_heads=pick(4, 1))
    add_case(
        bench,
        "decode 64 x 4096, 16 query heads each",
        [(pick(4096, 40), 1)] * pick(64, 2),
        many_heads,
    )


def dense_calls(
    bench: Bench, shape: Shape, batch: int, context: int
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return ways of decoding over dense tensors by torch. One treats heads of a group as positions
    of one head, the other uses torch's own grouping. Both give the same numbers."""
    groups = shape.num_heads // shape.num_kv_heads
    k, v = (bench.randn(batch, shape.num_kv_heads, context, shape.head_dim) for _ in range(2))
    q = bench.randn(batch, shape.num_kv_heads, groups, shape.head_dim)
    wide = q.reshape(batch, shape.num_heads, 1, shape.head_dim)
    return {
        "torch, heads folded": lambda: scaled_dot_product_attention(q, k, v),
        "torch, enable_gqa": lambda: scaled_dot_product_attention(wide, k, v, enable_gqa=True),
    }


def fastest_dense(bench: Bench, shape: Shape, batch: int, context: int) -> tuple[str, Timing]:
    """Time dense decoding by the flash backend, if there is one. Raises RuntimeError if nothing
    works."""
    found: list[tuple[str, Timing]] = []
    backends = [SDPBackend.FLASH_ATTENTION] if bench.is_cuda else [SDPBackend.MATH]
    reasons = []
    for name, call in dense_calls(bench, shape, batch, context).items():
        try:
            with sdpa_kernel(backends):
                found.append((name, bench.time(call)))
        except RuntimeError as error:
            reasons.append(f"{name}: {error}")
    if not found:
        raise RuntimeError("; ".join(reasons))
    return min(found, key=lambda item: item[1].cold_s)


def compare_paged(bench: Bench, batch: int, context: int) -> None:
    """Compare three ways in three lines: ours shuffled, ours in order, torch's dense."""
    shape, rows = shape_of(bench), [(context, 1)] * batch
    cost = shape.cost(rows, bench.dtype.itemsize)
    name = f"{batch} x {context}"
    shuffled = time_paged(bench, shape, rows)
    ordered = time_paged(bench, shape, rows, shuffled=False)
    kind, dense = fastest_dense(bench, shape, batch, context)
    ratio = shuffled.cold_s / dense.cold_s
    detail = shuffled.detail | {"of dense": f"{ratio:.2f} x"}
    detail |= {"of in order": f"{shuffled.cold_s / ordered.cold_s:.2f} x"}
    row = timed_row(f"{name}, paged", shuffled.cold_s, cost, bench.measured, detail=detail)
    bench.report.add(replace(row, aim=f"<= {PAGED_RATIO} x dense", is_reached=ratio <= PAGED_RATIO))
    for title, took in (("in order", ordered), (kind, dense)):
        detail = took.detail
        bench.report.add(
            timed_row(f"{name}, {title}", took.cold_s, cost, bench.measured, detail=detail)
        )


def run_paged(bench: Bench) -> None:
    """Run piece `paged`."""
    contexts = (24, 40) if bench.is_tiny else (128, 256, 512, 1024, 2048, 4096)
    for batch in (2,) if bench.is_tiny else (8, 32):
        for context in contexts:
            bench.attempt(
                f"{batch} x {context}", lambda b=batch, c=context: compare_paged(bench, b, c)
            )
