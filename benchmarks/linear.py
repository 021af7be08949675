"""Time of the linear layers of Qwen3-0.6B on this CPU, with plain and with packed weights.

    python -m benchmarks.linear [--threads 2]

Each shape is multiplied with as many different weights as fill 300 MB, as in a model.
"""

import argparse

import torch

from benchmarks.timing import best_time
from quire.ops.linear import linear, pack_weight

SHAPES = {
    "qkv": (4096, 1024),
    "output": (1024, 2048),
    "gate_up": (6144, 1024),
    "down": (1024, 3072),
    "head": (151936, 1024),
}
TOKENS = (1, 16, 256)
WORKING_SET_BYTES = 300_000_000


def measure(shape: tuple[int, int], dtype: torch.dtype, packed: bool) -> list[float]:
    """Seconds of one product for each number of tokens."""
    count = max(1, WORKING_SET_BYTES // (shape[0] * shape[1] * dtype.itemsize))
    weights = [(torch.randn(shape) * 0.02).to(dtype) for _ in range(count)]
    if packed:
        weights = [pack_weight(weight) for weight in weights]
    seconds = []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1]).to(dtype)
        seconds.append(best_time(lambda x=x: [linear(x, weight) for weight in weights]) / count)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    torch.set_num_threads(parser.parse_args().threads)
    print(f"{torch.get_num_threads()} threads; microseconds plain -> packed (GFLOP/s packed)")
    print(f"{'':22s}" + "".join(f"{f'{tokens} tokens':>26s}" for tokens in TOKENS))
    for dtype in (torch.bfloat16, torch.float32):
        for name, shape in SHAPES.items():
            plain, packed = (measure(shape, dtype, packing) for packing in (False, True))
            cells = [
                f"{a * 1e6:8.0f} -> {b * 1e6:.0f} ({2 * t * shape[0] * shape[1] / b / 1e9:.0f})"
                for t, a, b in zip(TOKENS, plain, packed, strict=True)
            ]
            print(
                f"{name:8s} {dtype!s:13s}" + "".join(f"{cell:>26s}" for cell in cells), flush=True
            )


if __name__ == "__main__":
    main()
