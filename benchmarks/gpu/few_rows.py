"""Cases of products of one to four rows, by the kernel and by the library.

Each call is of several products, each with its own weight, as in the layers of a step. Together the
weights are larger than the L2 cache, so that `warm` is the time of a product within a step.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.context import Bench, Made
from benchmarks.gpu.floors import Cost

WEIGHTS = 32  # products of a call

# Outputs and inputs, and rows.
SHAPES = {
    "Qwen3-0.6B qkv": (4096, 1024, (1, 2)),
    "Qwen3-0.6B o": (1024, 2048, (1, 2, 4)),
    "Qwen3-0.6B gate and up": (6144, 1024, (1, 2)),
    "Qwen3-0.6B down": (1024, 3072, (1, 2, 4)),
    "Qwen3-8B qkv": (6144, 4096, (1, 2)),
    "Qwen3-8B o": (4096, 4096, (1, 2)),
}
TINY_SHAPES = {"tiny": (25, 256, (1, 3))}


def product_case(bench: Bench, which: str, outputs: int, inputs: int, rows: int) -> Made:
    from quire.ops.kernels import few_rows

    products = {"ours": few_rows.few_rows, "library": torch.nn.functional.linear}
    product, count = products[which], bench.pick(WEIGHTS, 2)
    x = bench.randn(rows, inputs)
    weights = bench.randn(count, outputs, inputs).unbind()
    out_bytes = rows * outputs * x.element_size()
    cost = Cost(
        num_bytes=sum(weight.nbytes + x.nbytes + out_bytes for weight in weights),
        flops=2 * rows * outputs * inputs * count,
    )
    return lambda: [product(x, weight) for weight in weights], cost


def cases(is_tiny: bool) -> Iterator[tuple[str, str, Callable[[Bench], Made]]]:
    """Yield (kernel module, name, maker) of each case."""
    for name, (outputs, inputs, many) in (TINY_SHAPES if is_tiny else SHAPES).items():
        for rows in many:
            for which in ("ours", "library"):
                count = "2" if is_tiny else str(WEIGHTS)
                yield (
                    "few_rows",
                    f"{which}, {name}, {rows} rows, {count} products",
                    functools.partial(
                        product_case, which=which, outputs=outputs, inputs=inputs, rows=rows
                    ),
                )
