"""Measure a sum of ranks: processes of this machine that share memory, compared with gloo.

    python -m benchmarks.kernels.collective [--ranks 2] [--width 1024] [--rounds 3]

The tensor is float32 [tokens, width]. GB/s: bytes of the tensor over the time. The share is
relative to one thread's copy of as many bytes.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.result_files import Row, options_of, write
from quire.ops.collective import RankGroup
from quire.ops.collectives.shared_group import SharedGroup
from quire.ops.collectives.torch_group import file_store, gloo_group
from quire.ops.host.threads import set_num_threads
from quire.tools.report import benchmark_parser

TOKENS = (1, 16, 256, 2048)
CALLS = 20
KINDS = ("shared memory", "gloo")


def make_group(kind: str, directory: str, rank: int, size: int) -> RankGroup:
    """Join the other processes."""
    if kind == "gloo":
        return gloo_group(file_store(f"{directory}/gloo", size), rank, size)
    return SharedGroup(f"{directory}/ranks", rank, size)


def microseconds(call: Callable[[], object]) -> float:
    """Return the median time of one of several calls; as many at each rank."""
    call()
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def work(rank: int, directory: str, options: argparse.Namespace) -> None:
    """Measure both kinds in turn, as one of the processes."""
    set_num_threads(1)
    torch.set_num_threads(1)
    groups = [make_group(kind, directory, rank, options.ranks) for kind in KINDS]
    rows: list[Row] = []
    for tokens in TOKENS:
        x = torch.ones(tokens, options.width)
        other = torch.empty_like(x)
        copied = microseconds(partial(other.copy_, x))
        best = [float("inf")] * len(KINDS)
        for _ in range(options.rounds):
            for i, group in enumerate(groups):
                best[i] = min(best[i], microseconds(partial(group.all_reduce, x.zero_())))
        if rank == 0:
            for kind, us in zip(KINDS, best, strict=True):
                rate, share = x.nbytes / us / 1e3, copied / us
                row = {"tokens": tokens, "kind": kind, "us": us, "gb_per_s": rate}
                rows.append(row | {"of_copying": share})
                print(f"{tokens:6} tokens  {kind:14} {us:9.1f} us {rate:7.2f} GB/s {share:6.0%}")
    if rank == 0:
        write(options.output_json, "kernels.collective", rows, options_of(options))


def main() -> None:
    """Start the processes."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as directory:
        processes = [
            context.Process(target=work, args=(rank, directory, options))
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
