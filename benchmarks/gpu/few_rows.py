"""Cases of products of one to 64 rows, by the kernels and by the library.

Each call is of several products, each with its own weight, as in the layers of a step. Together the
weights are larger than the L2 cache, so that `warm` is the time of a product within a step.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.context import Bench, Made
from benchmarks.gpu.floors import Cost

WEIGHTS = 32  # products of a call
MAX_NUMBERS = 1 << 30  # of their weights together

# Outputs and inputs, and rows.
SHAPES = {
    "Qwen3-0.6B qkv": (4096, 1024, (1, 2)),
    "Qwen3-0.6B o": (1024, 2048, (1, 2, 4)),
    "Qwen3-0.6B gate and up": (6144, 1024, (1, 2)),
    "Qwen3-0.6B down": (1024, 3072, (1, 2, 4)),
    "Qwen3-8B qkv": (6144, 4096, (1, 2)),
    "Qwen3-8B o": (4096, 4096, (1, 2)),
}
STREAM_SHAPES = {
    "Qwen3-0.6B gate and up": (6144, 1024, (8,)),
    "Qwen3-8B qkv": (6144, 4096, (8, 32, 64)),
    "Qwen3-8B o": (4096, 4096, (8, 16, 32)),
    "Llama-3.1-8B gate and up": (28672, 4096, (8, 32, 64)),
    "Llama-3.1-8B down": (4096, 14336, (8, 32, 64)),
}
TINY_SHAPES = {"tiny": (25, 256, (1, 3))}
TINY_STREAM_SHAPES = {"tiny": (150, 128, (5, 17))}


def product_case(bench: Bench, which: str, outputs: int, inputs: int, rows: int) -> Made:
    from quire.ops.kernels import few_rows
    from quire.ops.kernels.products import stream_k

    products = {"few_rows": few_rows.few_rows, "stream_k": stream_k.stream_k}
    product = products.get(which, torch.nn.functional.linear)
    count = max(2, min(bench.pick(WEIGHTS, 2), MAX_NUMBERS // (outputs * inputs)))
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
    shapes = {"few_rows": TINY_SHAPES if is_tiny else SHAPES}
    shapes["stream_k"] = TINY_STREAM_SHAPES if is_tiny else STREAM_SHAPES
    for module, named in shapes.items():
        for name, (outputs, inputs, many) in named.items():
            for rows, which in itertools.product(many, (module, "library")):
                make = functools.partial(
                    product_case, which=which, outputs=outputs, inputs=inputs, rows=rows
                )
                label = "library" if which == "library" else "ours"
                yield module, f"{label}, {name}, {rows} rows", make
