"""Measure this machine's ceilings, and compute from them the least time of each workload.

    python -m benchmarks.cpu.limits --threads 2      prints one JSON line, takes about 10 s

Reading is measured by sums over 1 GiB, in small and in huge pages; the better counts. Arithmetic is
measured by multiply-adds in registers, with the widest instructions of the C++ core. A step takes
at least its arithmetic at the peak of the engine's format. It also takes at least as long as
reading the weights and the keys and values once. Attention is counted in 16 or 32 bits, whichever
is faster. Norms, sampling and the reading of embeddings are ignored.
"""

import argparse
import json
import mmap
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cpu.workloads import Shape, Workload
from quire.ops.host.native import core
from quire.ops.weights.formats import FORMATS, chosen_variant, variant_numbers
from quire.tools.limits import read_bytes_per_s

HUGE_BYTES, QUICK_BYTES = 1 << 30, 1 << 28
NUM_PIECES, READ_ROUNDS, PEAK_ROUNDS = 8, 7, 7
PEAKS = ("float32", "bfloat16", "float16", "int8")
FLOATS = PEAKS[:3]


def huge_read_bytes_per_s() -> float:
    """Measure as `read_bytes_per_s` does, over memory in huge pages."""
    with mmap.mmap(-1, HUGE_BYTES) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        values = torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)
        best = float("inf")
        for _ in range(READ_ROUNDS):
            for piece in values.view(NUM_PIECES, -1):
                began = time.perf_counter()
                piece.sum()
                best = min(best, time.perf_counter() - began)
        del values, piece
    return HUGE_BYTES / NUM_PIECES / best


def quick_read_bytes_per_s(threads: int) -> float:
    """Measure plain reading of memory in a fifth of a second, to compare minutes of a run."""
    torch.set_num_threads(threads)
    return read_bytes_per_s(torch.device("cpu"), QUICK_BYTES)


def measure_ceilings(threads: int) -> dict[str, float]:
    """Measure the bytes and operations per second of this many threads; a product and a sum are two
    operations."""
    torch.set_num_threads(threads)
    module = core()
    if module is None:
        raise SystemExit("the C++ core is not built, so the peaks cannot be measured.")
    found = {
        "read": read_bytes_per_s(torch.device("cpu")),
        "read_huge": huge_read_bytes_per_s(),
    }
    for index, name in enumerate(PEAKS):
        variant = variant_numbers()[chosen_variant(FORMATS[index])]
        rates = [module.linear_peak(index, variant, threads) for _ in range(PEAK_ROUNDS)]
        found[name] = max(rates)
    return found


@dataclass(frozen=True)
class Ceilings:
    """The best that was seen of each, with all threads."""

    bytes_per_s: float
    float_per_s: float
    float32_per_s: float
    int8_per_s: float

    @classmethod
    def of(cls, measured: dict[str, float]) -> "Ceilings":
        return cls(
            max(measured["read"], measured["read_huge"]),
            max(measured[name] for name in FLOATS),
            measured["float32"],
            measured["int8"],
        )

    def operations_per_s(self, arithmetic: str) -> float:
        peaks = {"float": self.float_per_s, "float32": self.float32_per_s, "int8": self.int8_per_s}
        return peaks[arithmetic]


@dataclass(frozen=True)
class Format:
    """How an engine stores weights (bytes of one, with its share of scales), how it multiplies."""

    layer_bytes: float
    head_bytes: float
    arithmetic: str

    def weight_bytes(self, shape: Shape) -> float:
        return self.layer_bytes * shape.layer_weights + self.head_bytes * shape.head_weights


@dataclass(frozen=True)
class Bound:
    """Least times of a model in a format on this machine."""

    shape: Shape
    format: Format
    ceilings: Ceilings

    def prefill_s(self, num_tokens: int, first: int, num_sampled: int) -> float:
        """Return the least seconds to prefill num_tokens at positions from `first` on, of one
        sequence or of each of several equal ones."""
        linear = 2 * (num_tokens * self.shape.layer_weights + num_sampled * self.shape.head_weights)
        mean_context = first + num_tokens / (2 * max(num_sampled, 1))
        return self._arithmetic_s(linear, num_tokens * mean_context)

    def decode_step_s(self, num_rows: int, context: float, kv_tokens: float) -> float:
        """Return the least seconds of a decode step. kv_tokens: tokens whose keys and values are
        read; a shared one counts once."""
        linear = 2 * num_rows * (self.shape.layer_weights + self.shape.head_weights)
        num_bytes = self.format.weight_bytes(self.shape)
        num_bytes += kv_tokens * self.shape.kv_bytes_per_token
        reading_s = num_bytes / self.ceilings.bytes_per_s
        return max(self._arithmetic_s(linear, num_rows * context), reading_s)

    def _arithmetic_s(self, linear: float, pairs: float) -> float:
        """Return the seconds of arithmetic. pairs: pairs of a query and a key, in one head of one
        layer."""
        shape = self.shape
        attention = 4 * pairs * shape.num_heads * shape.head_dim * shape.num_layers
        rate = self.ceilings.operations_per_s(self.format.arithmetic)
        return linear / rate + attention / self.ceilings.float_per_s


def min_times(workload: Workload, form: Format, ceilings: Ceilings) -> dict[str, float]:
    """Return the limit of each metric of a workload, in the metric's unit."""
    bound = Bound(workload.shape, form, ceilings)
    rows, own, out = workload.num_requests, workload.own, workload.output_len
    start = workload.shared + own
    context = start + out / 2
    kv_tokens = workload.shared + rows * (own + out / 2)
    step_s = bound.decode_step_s(rows, context, kv_tokens)
    prefill_s = bound.prefill_s(rows * own, workload.shared, rows)
    all_s, tokens = prefill_s + (out - 1) * step_s, rows * out
    if workload.name == "shared":
        prefix_s = bound.prefill_s(workload.shared, 0, 0)
        return {"cold_rate": tokens / (all_s + prefix_s), "warm_rate": tokens / all_s}
    found = {
        "single": {"ttft_s": prefill_s, "decode_rate": 1 / step_s},
        "batch": {"batch_rate": tokens / all_s},
        "rows": {"rows_rate": tokens / all_s},
        "long": {"long_rate": own / prefill_s, "deep_rate": 1 / step_s},
        "latent": {"long_rate": own / prefill_s, "deep_rate": 1 / step_s},
        "prefill": {"prefill_rate": own / prefill_s},
        "tiny": {"tiny_ms": 1e3 * step_s},
    }
    return found.get(workload.name, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    measured: dict[str, Any] = measure_ceilings(parser.parse_args().threads)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
