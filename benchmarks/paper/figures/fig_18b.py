"""P fig. 18 b: end-to-end latency by block size."""

from benchmarks.paper.bands import ANY, order
from benchmarks.paper.capacity import Capacity
from benchmarks.paper.figure import Curve, Effort, Figure, Runs, run_each
from benchmarks.paper.settings import OPT_13B, Load
from benchmarks.paper.systems import QUIRE, Options, serve
from quire.tools.workloads import ALPACA, SHAREGPT

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FEW_SIZES = (16, 32, 128, 256)
# P 7.2 gives no rates. Ours are below what blocks of 16 sustain, by `capacity.py`.
LOAD = 0.75
RATES = {each.name: LOAD * Capacity(QUIRE, OPT_13B, each).rate for each in (SHAREGPT, ALPACA)}


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure."""
    sizes = SIZES if effort.is_full else FEW_SIZES
    workloads, seconds = (SHAREGPT, ALPACA), effort.seconds / 2
    cases = [
        (
            QUIRE,
            OPT_13B,
            Load(workload, RATES[workload.name], seconds),
            Options(size),
        )
        for workload in workloads
        for size in sizes
    ]
    found = run_each(runs, serve, cases)
    by_name = {
        workload.name: dict(zip(sizes, found[i * len(sizes) : (i + 1) * len(sizes)], strict=True))
        for i, workload in enumerate(workloads)
    }
    curves = [
        Curve(
            f"{name}, {RATES[name]:.3g} requests/s",
            [float(size) for size in sizes],
            [served.latency_s for served in mine.values()],
        )
        for name, mine in by_name.items()
    ]
    alpaca, share = by_name[ALPACA.name], by_name[SHAREGPT.name]
    findings = [
        order("latency, blocks of 256 over 16, Alpaca-like",
              alpaca[256].latency_s / alpaca[16].latency_s, 1.5, ANY, "significantly degrade",
              "half more at least"),
        order("latency, blocks of 32 over 16, Alpaca-like",
              alpaca[32].latency_s / alpaca[16].latency_s, 0.8, 1.25, "work well",
              "a quarter to either side"),
        order("latency, blocks of 128 over 16, ShareGPT-like",
              share[128].latency_s / share[16].latency_s, 0.8, 1.25, "among the best",
              "a quarter to either side"),
    ]  # fmt: skip
    text = (
        "The simulation includes the cost of large blocks: empty slots in the last block. It does"
        " not include the cost of small blocks, since the formula does not know how kernels read"
        " them. So"
        " the curves do not rise to the left as the paper's do."
        " [CPU kernels](cpu-kernels.md#ways-of-attention) compares blocks of 16 with one block."
    )
    return [
        Figure(
            "fig_18b",
            "Block sizes: OPT-13B",
            "P fig. 18 b, 7.2",
            "tokens per block",
            "normalized latency (s per token)",
            curves,
            findings,
            text,
            is_log_x=True,
            is_log_y=True,
            seconds=seconds,
        )
    ]
