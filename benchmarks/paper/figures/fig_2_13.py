"""P fig. 2 and 13: what memory is used for, and how many requests that lets into a step."""

from dataclasses import replace

from benchmarks.paper.bands import ANY, falling, missed, near, order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Finding, Runs, run_each
from benchmarks.paper.settings import BLOCK_SIZE, MAX_LEN, OPT_13B, Load
from benchmarks.paper.systems import (
    ORCA_MAX,
    ORCA_ORACLE,
    ORCA_POW2,
    QUIRE,
    Served,
    serve,
)
from quire.tools.workloads import ALPACA, SHAREGPT, Workload

FULL_RATE = 4.0  # more than any of them sustains, so that memory is full
FULL_S, WARM_S = 100.0, 300.0  # of traces: filling and emptying the memory is a small part
SYSTEMS = (QUIRE, ORCA_ORACLE, ORCA_POW2, ORCA_MAX)
RATES = {SHAREGPT.name: 2.0, ALPACA.name: 30.0}  # the paper's
KINDS = {
    "live": "keys and values",
    "later": "reserved and used later",
    "never": "reserved and never used",
    "other": "fragmented or free",
}
ORDER = (ORCA_MAX, ORCA_POW2, ORCA_ORACLE, QUIRE)
PUBLISHED_LIVE = {ORCA_MAX: 20.4, ORCA_POW2: 26.8, ORCA_ORACLE: 38.2}  # %
MEMORY_SHARE = 0.15  # a band's width: memory does not depend on the times of steps
ONLY_LENGTHS = "15 % to either side: memory depends on lengths and chunks, not on step times"


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the bars of memory, and of requests per step on both workloads."""
    loads = [
        Load(SHAREGPT, FULL_RATE, max(effort.seconds / 2, FULL_S)),
        Load(SHAREGPT, RATES[SHAREGPT.name], max(effort.seconds, WARM_S)),
        Load(ALPACA, RATES[ALPACA.name], effort.seconds / 4),
    ]
    cases = [(system, OPT_13B, load) for load in loads for system in SYSTEMS]
    found = run_each(runs, serve, cases)
    full, share, alpaca = (
        {each.system: each for each in found[start : start + len(SYSTEMS)]}
        for start in range(0, len(found), len(SYSTEMS))
    )
    made = [_memory(full), _batched(SHAREGPT, "a", share), _batched(ALPACA, "b", alpaca)]
    return [replace(figure, seconds=load.seconds) for figure, load in zip(made, loads, strict=True)]


def _memory(found: dict[str, Served]) -> Figure:
    bar_positions = [float(index) for index in range(len(ORDER))]
    curves = [
        Curve(label, bar_positions, [100 * found[system].memory[kind] for system in ORDER])
        for kind, label in KINDS.items()
    ]
    findings = [
        near(f"memory that holds keys and values, {system}", 100 * found[system].memory["live"],
             published, MEMORY_SHARE, " %", ONLY_LENGTHS)
        for system, published in PUBLISHED_LIVE.items()
    ]  # fmt: skip
    vain = 100 * found[ORCA_MAX].memory["never"]
    later = 100 * found[ORCA_MAX].memory["later"]
    findings += [
        near("reserved and never used, Orca (Max)", vain, 57.3, MEMORY_SHARE, " %", ONLY_LENGTHS),
        near("reserved and used later, Orca (Max)", later, 13.3, MEMORY_SHARE, " %", ONLY_LENGTHS),
        *_of_blocks(found[QUIRE].memory),
    ]
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


def _of_blocks(memory: dict[str, float]) -> list[Finding]:
    """Return what quire's allocated blocks hold. A block of 16 has 7.5 empty slots on average, and
    a running sequence has at least its prompt and half of its answer."""
    waste = 100 * memory["never"] / (memory["live"] + memory["never"])
    context = SHAREGPT.inputs.mean + SHAREGPT.outputs.mean / 2
    empty = (BLOCK_SIZE - 1) / 2
    upper = 100 * empty / (empty + context)
    return [
        order("allocated slots that hold keys and values, quire", 100 - waste, 96.3, 99,
              "96.3 %", "not below the published number", " %"),
        missed("empty slots in quire's blocks", waste, upper / 2, upper, "3.7 %",
               f"(16 - 1) / 2 slots beside a mean context of {context:.0f} are {upper:.1f} % at"
               " most", " %"),
        order("memory that holds keys and values, quire", 100 * memory["live"], 85, 96.3, "",
              "less than of the blocks alone: the rest is the headroom of admission", " %"),
    ]  # fmt: skip


def _batched(workload: Workload, letter: str, found: dict[str, Served]) -> Figure:
    bar_positions = [float(index) for index in range(len(ORDER))]
    mean = {system: found[system].batched for system in ORDER}
    is_share = workload is SHAREGPT
    to_oracle, to_max = mean[QUIRE] / mean[ORCA_ORACLE], mean[QUIRE] / mean[ORCA_MAX]
    chunks = OPT_13B.num_slots // MAX_LEN
    if is_share:
        findings = [
            near("requests in a step, quire over Orca (Oracle)", to_oracle, 2.2),
            near("requests in a step, quire over Orca (Max)", to_max, 4.3),
            near("requests in a step, quire", mean[QUIRE], 30.4),
            near("requests in a step, Orca (Max)", mean[ORCA_MAX], 7.0, 0.1, "",
                 f"a tenth: {OPT_13B.num_slots:,} slots have {chunks} chunks of {MAX_LEN:,}"),
        ]  # fmt: skip
    else:
        ordered = [mean[system] for system in reversed(ORDER)]
        findings = [
            order("smallest ratio of neighbours, quire, Oracle, Pow2, Max", falling(ordered),
                  0.97, ANY, "a similar trend", "the order of fig. 13 a; 3 % for equal batches"),
            order("requests in a step, Orca (Max)", mean[ORCA_MAX], 0.9 * chunks, chunks, "",
                  f"{OPT_13B.num_slots:,} slots have {chunks} chunks of {MAX_LEN:,}"),
        ]  # fmt: skip
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
        [
            Curve("simulated", bar_positions, [mean[system] for system in ORDER]),
            *([Curve("published", [0.0, 3.0], [7.0, 30.4], is_published=True)] if is_share else []),
        ],
        findings,
        text,
        BARS,
        list(ORDER),
    )
