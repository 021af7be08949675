"""Sustained rates against the length of traces: how long a trace must be.

With one limit on the latency alone, a system survives a short trace at rates that it cannot sustain
for long. `sweep.py` also limits a sustained rate to the throughput of a full system.
"""

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.paper.bands import order
from benchmarks.paper.figure import Curve, Effort, Figure, Runs, run_each
from benchmarks.paper.settings import OPT_13B, Load
from benchmarks.paper.sweep import LIMIT_S, Sweep, sweep
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, QUIRE
from quire.tools.workloads import SHAREGPT

SYSTEMS = (QUIRE, ORCA_ORACLE, ORCA_MAX)
SECONDS = (30.0, 60.0, 120.0, 240.0, 480.0)
FEW_SECONDS = (60.0, 120.0, 240.0)
FIRST_RATE = 1.5
CONVERGED = 0.05  # of the rate of the longest trace; fig. 12 counts such rates as equal


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the table and the curves of fig. 12 a's rates."""
    lengths = lengths_of(effort)
    load = Load(SHAREGPT, FIRST_RATE, 0.0)
    cases = [
        (system, OPT_13B, load, replace(effort, seconds=seconds))
        for seconds in lengths
        for system in SYSTEMS
    ]
    found = run_each(runs, sweep, cases)
    num = len(SYSTEMS)
    by_name = {system: found[index::num] for index, system in enumerate(SYSTEMS)}
    off = [_largest_deviation(by_name, index) for index in range(len(lengths))]
    chosen = lengths.index(effort.seconds)
    curves = [
        Curve(name, list(lengths), [each.sustained for each in mine])
        for name, mine in by_name.items()
    ]
    finding = order(
        f"fig. 12 a, traces of {effort.seconds:g} s, largest deviation from {lengths[-1]:g} s",
        100 * max(off[chosen:]), 0.0, 100 * CONVERGED, "",
        f"{CONVERGED:.0%}: rates that fig. 12 counts as equal", " %",
    )  # fmt: skip
    short = _short_trace(by_name[ORCA_MAX][0], lengths[0])
    text = (
        f"The rates of fig. 12 a by the length of a trace. {short}"
        " So a sustained rate is at most the throughput of a full system."
        f" {_converged(lengths, off)} Fig. 12 has traces of {effort.seconds:g} s. The paper's"
        " traces take an hour."
    )
    return [
        Figure(
            "trace_lengths",
            "Sustained rates by the length of traces",
            "P 6.1, fig. 12 a",
            "seconds of arrivals",
            "sustained rate (requests per second)",
            curves,
            [finding],
            "\n".join([text, "", *_table(lengths, by_name, off)]),
            is_log_x=True,
            is_log_y=True,
        )
    ]


def lengths_of(effort: Effort) -> tuple[float, ...]:
    """Return the lengths of the traces to compare: the effort's, and at least one longer."""
    several = SECONDS if effort.is_full else FEW_SECONDS
    longer = max(several[-1], 2 * effort.seconds)
    return tuple(sorted({*several, effort.seconds, longer}))


def _short_trace(found: Sweep, seconds: float) -> str:
    """Return a sentence about the most loaded of the shortest traces."""
    point = found.points[-1]
    text = (
        f"At {point.rate_per_s:g} requests/s for {seconds:g} s, {found.system} serves"
        f" {point.throughput:.2f} requests/s and has a latency of {point.latency_s:.2f} s per token"
    )
    if point.latency_s < LIMIT_S:
        text += ": by latency alone it would sustain this rate"
    return text + "."


def _converged(lengths: Sequence[float], off: Sequence[float]) -> str:
    """Return a sentence about the shortest trace that is long enough. off: the largest deviation of
    each length, 0 for the longest."""
    enough = [
        seconds for index, seconds in enumerate(lengths[:-1]) if max(off[index:]) <= CONVERGED
    ]
    if not enough:
        return f"No length but the longest gives all rates within {CONVERGED:.0%}."
    return (
        f"From {enough[0]:g} s on, all lengths give all rates within {CONVERGED:.0%} of the"
        " longest trace's."
    )


def _largest_deviation(by_name: dict[str, list[Sweep]], index: int) -> float:
    """Return the largest deviation of this length's rates from the rates of the longest traces."""
    pairs = [(mine[index].sustained, mine[-1].sustained) for mine in by_name.values()]
    return max(abs(rate / longest - 1) for rate, longest in pairs)


def _table(
    lengths: tuple[float, ...], by_name: dict[str, list[Sweep]], off: list[float]
) -> list[str]:
    lines = [f"| seconds | {' | '.join(by_name)} | off by at most |"]
    lines.append("|---|" + "---|" * (len(by_name) + 1))
    for index, (seconds, share) in enumerate(zip(lengths, off, strict=True)):
        rates = [f"{mine[index].sustained:.3g}" for mine in by_name.values()]
        lines.append(f"| {seconds:g} | {' | '.join(rates)} | {share:.1%} |")
    return lines
