"""P fig. 12: normalized latency against the rate of requests, of five systems."""

from benchmarks.paper.figure import Effort, Figure, Finding, Runs, run_each
from benchmarks.paper.settings import OPT_13B, OPT_66B, OPT_175B, Load, Setting
from benchmarks.paper.sweep import LIMIT_S, OTHER_LIMITS_S, Sweep, sweep
from benchmarks.paper.systems import FASTER_TRANSFORMER, ORCA_MAX, ORCA_ORACLE, QUIRE, SYSTEMS
from quire.tools.workloads import ALPACA, SHAREGPT, Workload

PANELS = (
    ("a", OPT_13B, SHAREGPT),
    ("b", OPT_66B, SHAREGPT),
    ("c", OPT_175B, SHAREGPT),
    ("d", OPT_13B, ALPACA),
    ("e", OPT_66B, ALPACA),
    ("f", OPT_175B, ALPACA),
)
FIRST_RATE = {SHAREGPT.name: 0.5, ALPACA.name: 2.0}
# Of the rates that quire sustains, over others'. P gives them for ShareGPT, over three models.
PUBLISHED = {
    ORCA_ORACLE: ("1.7 to 2.7", 1.2, 3.0),
    ORCA_MAX: ("2.7 to 8", 2.0, 8.0),
    FASTER_TRANSFORMER: ("up to 22", 5.0, 35.0),
}


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make one figure a panel."""
    panels = PANELS if effort.is_full else (PANELS[0], PANELS[3])
    cases = [
        (system, setting, Load(workload, FIRST_RATE[workload.name], 0.0), effort)
        for _, setting, workload in panels
        for system in SYSTEMS
    ]
    found = run_each(runs, sweep, cases)
    num = len(SYSTEMS)
    return [
        _panel(*panel, found[number * num : (number + 1) * num])
        for number, panel in enumerate(panels)
    ]


def _panel(letter: str, setting: Setting, workload: Workload, sweeps: list[Sweep]) -> Figure:
    by_name = {each.system: each for each in sweeps}
    findings = []
    for other, (published, low, high) in PUBLISHED.items():
        is_share = workload is SHAREGPT
        if not is_share:
            published, low, high = "", 0.9 if other == ORCA_ORACLE else 1.5, 80.0
        ratio = _ratio(by_name, other, LIMIT_S)
        findings.append(Finding(f"sustained rate, quire over {other}", ratio, low, high, published))
    others = "; ".join(
        f"{_ratio(by_name, ORCA_ORACLE, limit):.2f} and {_ratio(by_name, ORCA_MAX, limit):.2f} at"
        f" {limit:g} s"
        for limit in OTHER_LIMITS_S
    )
    text = (
        f"A rate counts as sustained up to {LIMIT_S:g} s per token. At other limits the ratios to"
        f" Orca (Oracle) and Orca (Max) are {others}. quire sustains"
        f" {by_name[QUIRE].sustained():.2f} requests/s."
    )
    if letter == "f":
        text += (
            " As in the paper, memory is ample for short sequences here. Arithmetic and reading"
            " limit every system that batches by iterations."
        )
    highest = 1.15 * max(each.sustained(OTHER_LIMITS_S[1]) for each in sweeps)
    curves = [each.curve for each in sweeps]
    return Figure(
        f"fig_12{letter}",
        f"Latency against rate: {setting.name}, {workload.name}",
        f"P fig. 12 {letter}",
        "requests per second",
        "normalized latency (s per token)",
        [curve.up_to(highest) for curve in curves],
        findings,
        text,
        y_limit=1.0,
    )


def _ratio(by_name: dict[str, Sweep], other: str, limit_s: float) -> float:
    return by_name[QUIRE].sustained(limit_s) / by_name[other].sustained(limit_s)
