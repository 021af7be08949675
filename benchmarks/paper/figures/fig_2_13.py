"""P fig. 2 and 13: what memory is used for, and how many requests that lets into a step."""

from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Finding, Runs, run_each
from benchmarks.paper.settings import OPT_13B, Load
from benchmarks.paper.systems import (
    ORCA_MAX,
    ORCA_ORACLE,
    ORCA_POW2,
    QUIRE,
    Served,
    serve,
)
from quire.tools.workloads import ALPACA, SHAREGPT, Workload

FULL_RATE = 8.0  # more than any of them sustains, so that memory is full
WARM_S = 120.0
SYSTEMS = (QUIRE, ORCA_ORACLE, ORCA_POW2, ORCA_MAX)
RATES = {SHAREGPT.name: 2.0, ALPACA.name: 30.0}  # the paper's
KINDS = {
    "live": "keys and values",
    "later": "reserved and used later",
    "never": "reserved and never used",
    "other": "fragmented or free",
}
ORDER = (ORCA_MAX, ORCA_POW2, ORCA_ORACLE, QUIRE)
PUBLISHED_LIVE = {
    ORCA_MAX: ("20.4 %", 0.12, 0.28),
    ORCA_POW2: ("", 0.18, 0.35),
    ORCA_ORACLE: ("38.2 %", 0.28, 0.46),
    QUIRE: ("96.3 %", 0.85, 0.99),
}


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the bars of memory, and of requests per step on both workloads."""
    loads = [
        Load(SHAREGPT, FULL_RATE, effort.seconds / 2),
        Load(SHAREGPT, RATES[SHAREGPT.name], max(effort.seconds, WARM_S)),
        Load(ALPACA, RATES[ALPACA.name], effort.seconds / 2),
    ]
    cases = [(system, OPT_13B, load) for load in loads for system in SYSTEMS]
    found = run_each(runs, serve, cases)
    full, share, alpaca = (
        {each.system: each for each in found[start : start + len(SYSTEMS)]}
        for start in range(0, len(found), len(SYSTEMS))
    )
    return [_memory(full), _batched(SHAREGPT, "a", share), _batched(ALPACA, "b", alpaca)]


def _memory(found: dict[str, Served]) -> Figure:
    bar_positions = [float(index) for index in range(len(ORDER))]
    curves = [
        Curve(label, bar_positions, [100 * found[system].memory[kind] for system in ORDER])
        for kind, label in KINDS.items()
    ]
    findings = [
        Finding(f"memory that holds keys and values, {system}", 100 * found[system].memory["live"],
                100 * low, 100 * high, published, " %")
        for system, (published, low, high) in PUBLISHED_LIVE.items()
    ]  # fmt: skip
    vain = 100 * found[ORCA_MAX].memory["never"]
    later = 100 * found[ORCA_MAX].memory["later"]
    findings += [
        Finding("reserved and never used, Orca (Max)", vain, 45, 70, "57.3 %", " %"),
        Finding("reserved and used later, Orca (Max)", later, 8, 20, "13.3 %", " %"),
    ]
    ours = found[QUIRE].memory
    waste = 100 * ours["never"] / (ours["live"] + ours["never"])
    findings.append(Finding("empty slots in quire's blocks", waste, 0.5, 4, "3.7 %", " %"))
    text = (
        f"At {FULL_RATE:g} requests/s, which no system sustains; averages over the time with"
        " waiting requests. quire's other memory is the headroom of admission, and blocks that the"
        " next prompt did not fit into. The paper counts allocated blocks alone."
    )
    return Figure(
        "fig_2",
        "Use of memory: OPT-13B, ShareGPT-like",
        "P fig. 2, T fig. 3.2",
        "",
        "% of the memory for keys and values",
        curves,
        findings,
        text,
        BARS,
        list(ORDER),
    )


def _batched(workload: Workload, letter: str, found: dict[str, Served]) -> Figure:
    bar_positions = [float(index) for index in range(len(ORDER))]
    mean = {system: found[system].batched for system in ORDER}
    is_share = workload is SHAREGPT
    to_oracle, to_max = mean[QUIRE] / mean[ORCA_ORACLE], mean[QUIRE] / mean[ORCA_MAX]
    findings = [
        Finding("requests in a step, quire over Orca (Oracle)", to_oracle, 1.5 if is_share else 0.9,
                3.2, "2.2" if is_share else ""),
        Finding("requests in a step, quire over Orca (Max)", to_max, 2.8 if is_share else 4,
                5.5 if is_share else 40, "4.3" if is_share else ""),
    ]  # fmt: skip
    if is_share:
        findings += [
            Finding("requests in a step, quire", mean[QUIRE], 18, 38, "30.4"),
            Finding("requests in a step, Orca (Max)", mean[ORCA_MAX], 5.5, 8, "7.0"),
        ]
    text = f"Means over time at {RATES[workload.name]:g} requests/s, as in the paper. " + (
        "This rate is near the limit of quire, and above the limit of every other system."
        if is_share
        else "quire is not at its limit here: its batch holds the requests that arrive while an"
        " answer is generated. The paper's steps with so many requests took longer than the"
        " formula's."
    )
    return Figure(
        f"fig_13{letter}",
        f"Requests in a step: OPT-13B, {workload.name}",
        f"P fig. 13 {letter}",
        "",
        "requests",
        [Curve("simulated", bar_positions, [mean[system] for system in ORDER])],
        findings,
        text,
        BARS,
        list(ORDER),
    )
