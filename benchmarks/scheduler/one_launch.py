"""Measure the host time of one kernel launch outside of a graph, by Triton and prepared.

    python -m benchmarks.scheduler.one_launch

The driver does nothing, so the time is that of Python before the call into CUDA, with Triton's own
launcher class. Both ways take turns; a figure is the shortest of many rounds. Each kernel is
compiled for Hopper first.
"""

import math
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.result_files import options_of, write
from quire.tools.report import benchmark_parser, print_head

ROUNDS, LAUNCHES = 100, 300
WAYS = {"triton": "0", "prepared": "1"}


def launches() -> dict[str, Callable[[], object]]:
    """Return launches of kernels by name; their memory is allocated."""
    from quire.ops.kernels import norm

    x_TD = torch.zeros(4, 1024, dtype=torch.bfloat16)
    weight_D = torch.nn.Parameter(torch.ones(1024), requires_grad=False)
    kernel, out_TD, total_TD = norm._rms_norm_kernel, x_TD.clone(), x_TD.clone()
    given = x_TD, x_TD, weight_D, out_TD, total_TD, 1024, 0, 1, 1e-6
    options = {"WIDTH": 1024, "AHEAD": False, "num_warps": 2}
    return {
        name: lambda adds=adds: kernel[(4,)](*given, HAS_RESIDUAL=adds, **options)
        for name, adds in (("rms_norm", False), ("add_rms_norm", True))
    }


def host_us(launch: Callable[[], object], launched: list[Any]) -> float:
    """Return the host time of one launch, in microseconds."""
    began = time.thread_time()
    for _ in range(LAUNCHES):
        launch()
    seconds = time.thread_time() - began
    launched.clear()
    return seconds / LAUNCHES * 1e6


def main() -> None:
    options = benchmark_parser(__doc__).parse_args()
    from quire.ops.kernels.launch import PREPARED, prepares
    from tests.support.kernels.compiled_launches import use

    driver, rows = use(), []
    print_head("host time of one launch of a kernel, microseconds (the shortest)")
    for name, launch in launches().items():
        us = dict.fromkeys(WAYS, math.inf)
        for _ in range(ROUNDS):
            for way, is_on in WAYS.items():
                os.environ[PREPARED] = is_on
                prepares.cache_clear()
                us[way] = min(us[way], host_us(launch, driver.launches))
        print(f"{name:14} " + ", ".join(f"{way} {each:.1f}" for way, each in us.items()))
        rows.append({"kernel": name, "us": us})
    write(options.output_json, "scheduler.one_launch", rows, options_of(options))


if __name__ == "__main__":
    main()
