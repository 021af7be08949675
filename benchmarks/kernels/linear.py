"""Measure linear layers of Qwen3 on this CPU: the C++ core's formats and torch's packed weights.

    python -m benchmarks.kernels.linear [--threads 2] [--formats bfloat16 int8]
        [--shapes gate_up 8b_down] [--variants amx avx512_bf16] [--rows 16 256]

Up to 8 rows a product is bound by reading the weights: GB/s, with the share of the machine's read
bandwidth. From 16 on it is bound by arithmetic: 10^9 operations per second. The share is relative
to the peak of the machine's best instruction set in registers, whichever is timed, or of
QUIRE_CPU_VARIANT. Both limits are measured in the same run. Shapes are Qwen3-0.6B's, and with 8b_
Qwen3-8B's. Each shape is multiplied with as many different weights as fill 300 MB, as in a model.
The best of many single products counts, because other processes only make them slower.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.result_files import options_of, write
from quire.ops.host.native import core
from quire.ops.host.threads import num_threads, set_num_threads
from quire.ops.linear import linear
from quire.ops.weights.device_weights import TYPICAL_TOKENS
from quire.ops.weights.formats import (
    SIZES,
    Quantization,
    forced_variant,
    packed_form,
    variant_numbers,
    variants,
)
from quire.ops.weights.pack import pack
from quire.ops.weights.packed import PackedWeight
from quire.tools.limits import read_bytes_per_s
from quire.tools.report import benchmark_parser, print_head

SHAPES = {
    "qkv": (4096, 1024),
    "output": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
LARGE_SHAPES = {
    "8b_qkv": (6144, 4096),
    "8b_output": (4096, 4096),
    "8b_gate_up": (24576, 4096),
    "8b_down": (4096, 12288),
}
FEW_ROWS = (1, 2, 4, 8)
MANY_ROWS = (16, 64, 256, 1024)
WORKING_SET_BYTES = 300_000_000
MIN_REPEATS, MIN_S, MAX_S = 8, 0.3, 3.0


@dataclass(frozen=True)
class Kind:
    """A way to store and multiply. peak: the instruction that does it."""

    name: str
    dtype: torch.dtype
    quantization: Quantization | None = None
    is_torch: bool = False

    @property
    def peak(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return "int8" if self.quantization is not None else name


KINDS = [
    Kind("torch bfloat16", torch.bfloat16, is_torch=True),
    Kind("bfloat16", torch.bfloat16),
    Kind("torch float32", torch.float32, is_torch=True),
    Kind("float32", torch.float32),
    Kind("float16", torch.float16),
    Kind("int8 rows", torch.bfloat16, Quantization("int8", 0)),
    Kind("int8", torch.bfloat16, Quantization("int8", 128)),
    Kind("int4", torch.bfloat16, Quantization("int4", 32)),
    Kind("int4 of 128", torch.bfloat16, Quantization("int4", 128)),
]


def copies(kind: Kind, shape: tuple[int, int], variant: str) -> list[Any]:
    """Return equal weights, each in memory of its own."""
    weight = (torch.randn(shape) * 0.02).to(kind.dtype)
    if kind.is_torch:
        reorder = torch.ops.mkldnn._reorder_linear_weight
        count = max(1, WORKING_SET_BYTES // weight.nbytes)
        return [reorder(weight, TYPICAL_TOKENS) for _ in range(count)]
    first = pack(weight, kind.quantization, variant)
    count = max(1, WORKING_SET_BYTES // first.nbytes)
    more = [PackedWeight(first.data.clone(), first.layout) for _ in range(count - 1)]
    return [first, *more]


def best_s(weights: list[Any], x: torch.Tensor) -> float:
    """Return the seconds of the fastest single product with x [rows, inputs]."""
    best, spent, repeats, began = float("inf"), 0.0, 0, time.perf_counter()
    while (repeats < MIN_REPEATS or spent < MIN_S) and spent < MAX_S:
        weight = weights[repeats % len(weights)]
        before = time.perf_counter()
        linear(x, weight)
        after = time.perf_counter()
        best, spent, repeats = min(best, after - before), after - began, repeats + 1
    return best


def peaks(threads: int) -> dict[str, dict[str, float]]:
    """Return the operations per second of each instruction set, or of QUIRE_CPU_VARIANT, by number
    format, of all threads."""
    module = core()
    assert module is not None
    names = ("float32", "bfloat16", "float16", "int8")
    forced = forced_variant()
    measured = variants() if forced is None else (forced,)
    best = {variant: dict.fromkeys(names, 0.0) for variant in measured}
    for _ in range(7):
        for variant, found in best.items():
            number = variant_numbers()[variant]
            for index, name in enumerate(names):
                found[name] = max(found[name], module.linear_peak(index, number, threads))
    return best


def measure(
    kind: Kind, shape: tuple[int, int], variant: str, rows: tuple[int, ...]
) -> dict[int, float]:
    weights = copies(kind, shape, variant)
    return {t: best_s(weights, torch.randn(t, shape[1]).to(kind.dtype)) for t in rows}


def cells(
    kind: Kind, shape: tuple[int, int], seconds: dict[int, float], limits: dict[str, float]
) -> list[str]:
    """Return the cells of a row."""
    num = shape[0] * shape[1]
    weight = torch.empty(shape, dtype=kind.dtype, device="meta")
    num_bytes = num * weight.itemsize
    if kind.quantization is not None:
        form = packed_form(kind.quantization)
        sizes, group = SIZES[form.format], form.group_size or shape[1]
        num_bytes = num * sizes.bits // 8 + sizes.factor_bytes * num // group
    shown = []
    for rows, s in seconds.items():
        rate, limit = num_bytes / s, limits["read"]
        if rows > max(FEW_ROWS):
            rate, limit = 2 * rows * num / s, limits[kind.peak]
        shown.append(f"{rate / 1e9:7.0f} {rate / limit:4.0%}")
    return shown


def table(arguments: argparse.Namespace, print_line: Callable[[str], None]) -> dict[str, Any]:
    of_variants = peaks(num_threads())
    limits = {"read": read_bytes_per_s(torch.device("cpu"))}
    for found in of_variants.values():
        limits |= {name: max(peak, limits.get(name, 0.0)) for name, peak in found.items()}
    shown = ", ".join(f"{name} {limit / 1e9:,.0f}" for name, limit in limits.items())
    print_line(f"limits: GB/s of reading and 10^9 operations/s in registers: {shown}")
    for variant, found in of_variants.items():
        shown = ", ".join(f"{name} {peak / 1e9:,.0f}" for name, peak in found.items())
        print_line(f"  {variant}: {shown}")
    rows = tuple(arguments.rows)
    heads = [f"{n} {'GB/s' if n <= max(FEW_ROWS) else 'Gop/s'}" for n in rows]
    print_line(f"{'':38s}" + "".join(f"{head:>13s}" for head in heads))
    results: dict[str, Any] = {"limits": limits, "peaks": of_variants, "rows": []}
    for name in arguments.shapes:
        shape = (SHAPES | LARGE_SHAPES)[name]
        for kind in [kind for kind in KINDS if kind.name in arguments.formats]:
            for variant in ["torch"] if kind.is_torch else arguments.variants:
                seconds = measure(kind, shape, variant, rows)
                shown_cells = cells(kind, shape, seconds, limits)
                print_line(
                    f"{name:11s}{kind.name:15s}{variant:12s}"
                    + "".join(f"{cell:>13s}" for cell in shown_cells)
                )
                labels = {"variant": variant, "shape": name, "format": kind.name}
                results["rows"] += [labels | {"rows": n, "seconds": s} for n, s in seconds.items()]
    return results


def main() -> None:
    parser, best = benchmark_parser(__doc__), forced_variant() or variants()[-1]
    names = [kind.name for kind in KINDS]
    parser.add_argument("--threads", type=int, default=num_threads())
    parser.add_argument("--formats", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--shapes", nargs="+", choices=[*SHAPES, *LARGE_SHAPES], default=list(SHAPES)
    )
    parser.add_argument("--variants", nargs="+", choices=variants(), default=[best])
    parser.add_argument("--rows", nargs="+", type=int, default=list(FEW_ROWS + MANY_ROWS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    set_num_threads(arguments.threads)
    print_head(f"linear layers, instruction sets {' '.join(arguments.variants)}")
    found = table(arguments, lambda line: print(line, flush=True))
    settings = options_of(arguments) | {"limits": found["limits"], "peaks": found["peaks"]}
    write(arguments.output_json, "kernels.linear", found["rows"], settings)


if __name__ == "__main__":
    main()
