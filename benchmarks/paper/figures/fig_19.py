"""P fig. 19: swapping against computing again, by block size: by formula, and end to end."""

from dataclasses import replace

from benchmarks.paper.bands import ANY, order
from benchmarks.paper.figure import Curve, Effort, Figure, Runs, run_each
from benchmarks.paper.settings import OPT_13B, Load
from benchmarks.paper.systems import QUIRE, Options, serve
from benchmarks.virtual.swap_costs import (
    Device,
    SwapTime,
    Victim,
    batched_s,
    per_block_s,
    recompute_s,
)
from quire.spec.cache_group import CacheGroup
from quire.tools.simulate.roofline import COPY_SHARE, FLOPS_SHARE, MEMORY_SHARE
from quire.tools.workloads import SHAREGPT

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FEW_SIZES = (16, 64)
END_TO_END_SIZES = (16, 64, 256)
RATE = 3.0  # more than quire sustains, so that sequences are preempted
MIN_PREEMPTIONS = 20
MILLISECONDS = 1e3
# The A2 machines (P 6.1) have processors of the Cascade Lake series, so the link is PCIe 3 with 16
# lanes. 10 us submit a transfer. Products and reading reach the same shares of the peak rates as in
# all steps.
A100 = Device(
    "A100, PCIe 3", COPY_SHARE * 15.75e9, 10e-6, MEMORY_SHARE * 1555e9, 100e9, FLOPS_SHARE * 312e12
)
VICTIM = Victim(CacheGroup("full", tuple(range(40)), 40, 128), 13e9, 256, 16)
WAYS: dict[str, SwapTime] = {
    "recompute": recompute_s,
    "swap, many transfers (the paper's)": per_block_s,
    "swap, one transfer (quire's)": batched_s,
}


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make both figures."""
    return [_overhead(), _end_to_end(effort, runs)]


def _overhead() -> Figure:
    seconds = {
        label: [way(replace(VICTIM, block_size=size), A100) for size in SIZES]
        for label, way in WAYS.items()
    }
    again, swap, batched = seconds.values()
    at = {size: index for index, size in enumerate(SIZES)}
    findings = [
        order("swap over recomputation, blocks of 1, many transfers", swap[0] / again[0], 2, ANY,
              "excessive", "twice at least"),
        order("recomputation over swap, blocks of 256, many transfers",
              again[at[256]] / swap[at[256]], 1.0, 1.2, "1 to 1.2",
              "swapping is more efficient, but recomputation takes at most 20 % longer"),
        order("swap, blocks of 1 over 256, one transfer", batched[0] / batched[at[256]], 0.99,
              1.01, "", "one transfer does not depend on the block size"),
    ]  # fmt: skip
    text = (
        f"A sequence of {VICTIM.num_tokens} tokens is swapped out and in again, or recomputed, by"
        " formula. Recomputation does not depend on the block size; many small transfers do. quire"
        " gathers all blocks of a plan and sends them in one transfer, so its swaps do not depend"
        " on the block size either. Measured rates decide between the two"
        " (`scheduler/core/preemption.py`). `benchmarks/memory/swap.py` measures the copies of this"
        " machine."
    )
    return Figure(
        "fig_19a",
        "Swapping and recomputation: OPT-13B",
        "P fig. 19 a, 7.3",
        "tokens per block",
        "ms",
        [
            Curve(label, [float(size) for size in SIZES], [MILLISECONDS * each for each in mine])
            for label, mine in seconds.items()
        ],
        findings,
        text,
        is_log_x=True,
        is_log_y=True,
    )


def _copy_s(way: SwapTime, block_size: int) -> float:
    """Return seconds to move one block one way."""
    return way(replace(VICTIM, block_size=block_size, num_tokens=block_size), A100) / 2


def _end_to_end(effort: Effort, runs: Runs) -> Figure:
    sizes = END_TO_END_SIZES if effort.is_full else FEW_SIZES
    load = Load(SHAREGPT, RATE, effort.seconds)
    cases = []
    for label, way in WAYS.items():
        for size in sizes:
            mode = "recompute" if label == "recompute" else "swap"
            options = Options(size, mode=mode, copy_s=_copy_s(way, size))
            cases.append((QUIRE, OPT_13B, load, options))
    found = run_each(runs, serve, cases)
    curves, by_way = [], {}
    for index, label in enumerate(WAYS):
        mine = found[index * len(sizes) : (index + 1) * len(sizes)]
        by_way[label] = dict(zip(sizes, mine, strict=True))
        curves.append(Curve(label, [float(s) for s in sizes], [each.latency_s for each in mine]))
    again, swap, _ = by_way.values()
    findings = [
        order(f"latency by swapping over recomputing, blocks of {size}, many transfers",
              swap[size].latency_s / again[size].latency_s, 0.8, 1.25, "comparable",
              "a quarter to either side")
        for size in sizes if 16 <= size <= 64
    ]  # fmt: skip
    small, all_requests = sizes[0], RATE * effort.seconds
    recomputed = MIN_PREEMPTIONS * SHAREGPT.inputs.mean
    share = recomputed / all_requests / (SHAREGPT.inputs.mean + SHAREGPT.outputs.mean)
    num = again[small].num_preemptions
    findings += [
        order(f"preemptions, blocks of {small}", num, MIN_PREEMPTIONS, all_requests, "",
              "enough to compare, and less than one for each request"),
        order(f"share of the preempted sequences that are swapped, blocks of {small}",
              100 * swap[small].num_swapped / max(1, swap[small].num_preemptions), 95, 100, "",
              "all but those whose prompt is not computed yet", " %"),
        order(f"computed tokens, recomputing over swapping, blocks of {small}",
              again[small].num_computed / swap[small].num_computed, 1 + share, 1.25, "",
              f"more by {MIN_PREEMPTIONS} prompts at least, and by a quarter at most"),
    ]  # fmt: skip
    text = (
        f"{RATE:g} requests/s of ShareGPT-like lengths, {num} preemptions with blocks of {small}."
        f" The recomputing runs compute {again[small].num_computed:,} tokens, the swapping ones"
        f" {swap[small].num_computed:,}."
    )
    return Figure(
        "fig_19b",
        "Latency with swapping or recomputation: OPT-13B, ShareGPT-like",
        "P fig. 19 b, 7.3",
        "tokens per block",
        "normalized latency (s per token)",
        curves,
        findings,
        text,
        is_log_x=True,
        seconds=load.seconds,
    )
