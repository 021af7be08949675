"""Piece `limits`: what this device reaches of a copy and of a product, which the others go by."""

from dataclasses import asdict

import torch

from benchmarks.gpu.context import Bench
from benchmarks.gpu.floors import Cost, Limits
from benchmarks.gpu.report import timed_row


def copy_limit(bench: Bench) -> float:
    """Measure a copy within the device, in bytes per second, read and written together."""
    num_bytes = bench.pick(4 << 30, 1 << 20)
    source = torch.ones(num_bytes, dtype=torch.int8, device=bench.device)
    to = torch.empty_like(source)
    took = bench.time(lambda: to.copy_(source))
    cost = Cost(num_bytes=2 * num_bytes)
    bench.report.add(timed_row("copy, 4 GiB", took.cold_s, cost, None, detail=took.detail))
    return cost.num_bytes / min(took.cold_s, took.warm_s)


def read_limit(bench: Bench) -> float:
    """Measure a sum, which only reads, as decoding does, in bytes per second."""
    num = bench.pick(1 << 30, 1 << 18)
    values = torch.ones(num, device=bench.device)
    took = bench.time(values.sum)
    cost = Cost(num_bytes=4 * num)
    bench.report.add(timed_row("read (sum), 4 GiB", took.cold_s, cost, None, detail=took.detail))
    return cost.num_bytes / min(took.cold_s, took.warm_s)


def matmul_limit(bench: Bench, size: int) -> float:
    """Measure a square product in the model's dtype, in operations per second."""
    a, b = bench.randn(size, size), bench.randn(size, size)
    out = torch.empty_like(a)
    took = bench.time(lambda: torch.matmul(a, b, out=out))
    cost = Cost(num_bytes=3 * size * size * a.element_size(), flops=2 * size**3)
    name = f"matmul {size}^3, {str(a.dtype).removeprefix('torch.')}"
    bench.report.add(timed_row(name, took.cold_s, cost, None, detail=took.detail))
    return cost.flops / min(took.cold_s, took.warm_s)


def run(bench: Bench) -> None:
    """Measure the limits. The bandwidth is the better of copying and reading."""
    copied, multiplied = [0.0], [0.0]
    bench.attempt("copy", lambda: copied.append(copy_limit(bench)))
    bench.attempt("read", lambda: copied.append(read_limit(bench)))
    for real, tiny in ((8192, 128), (4096, 64)):
        size = bench.pick(real, tiny)
        bench.attempt(f"matmul {size}", lambda n=size: multiplied.append(matmul_limit(bench, n)))
    if max(copied) and max(multiplied):
        found = Limits(max(copied), max(multiplied), "measured")
        bench.report.facts["limits"] = asdict(found)
        print(f"  {found.bytes_per_s / 1e9:,.0f} GB/s, {found.flops_per_s / 1e12:,.0f} TFLOP/s")
    bench.report.write()
