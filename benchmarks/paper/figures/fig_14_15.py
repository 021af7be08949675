"""P fig. 14 and 15: several samples and beams of one prompt, which share its blocks."""

from dataclasses import replace

from benchmarks.paper.bands import falling, near, order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Finding, Runs, run_each
from benchmarks.paper.settings import OPT_13B, Load, Method
from benchmarks.paper.sweep import Sweep, sweep
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, ORCA_POW2, QUIRE, serve
from quire.tools.workloads import ALPACA, SHAREGPT

SYSTEMS = (QUIRE, ORCA_ORACLE, ORCA_POW2, ORCA_MAX)
NUMS = (2, 4, 6)
ONE = Method()
FIRST_RATE = 6.0
SAVING_RATE = {ALPACA.name: 4.0, SHAREGPT.name: 0.3}  # for which the memory is enough
MIN_SAVING_S = 40.0  # of a trace: a shorter one is not in a steady state
SAVED = {  # P 6.3: %, of 2 and of 6 sequences
    (ALPACA.name, False): {2: 6.1, 6: 9.8},
    (SHAREGPT.name, False): {2: 16.2, 6: 30.5},
    (ALPACA.name, True): {2: 37.6, 6: 55.2},
    (SHAREGPT.name, True): {2: 44.3, 6: 66.3},
}


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the panels of rates, and the bars of savings."""
    nums = NUMS if effort.is_full else (NUMS[-1],)
    methods = [ONE] + [
        Method("beams" if is_beams else "samples", num, is_beams)
        for is_beams in (False, True)
        for num in nums
    ]
    cases = [
        (system, OPT_13B, Load(ALPACA, FIRST_RATE, 0.0, method), _effort(effort, method))
        for method in methods
        for system in SYSTEMS
    ]
    found = run_each(runs, sweep, cases)
    num = len(SYSTEMS)
    by_method = {
        method: {each.system: each for each in found[index * num : (index + 1) * num]}
        for index, method in enumerate(methods)
    }
    panels = [_panel(method, by_method[method]) for method in methods[1:]]
    return [_gains(effort, by_method), *panels, _savings(effort, runs, methods[1:])]


def _effort(effort: Effort, method: Method) -> Effort:
    """Return shorter traces, for beams above all: their steps take a hundred times as long to
    simulate."""
    seconds = effort.seconds * (0.1 if method.is_beams else 0.2)
    return replace(effort, seconds=seconds, halvings=min(2, effort.halvings))


def _ratio(sweeps: dict[str, Sweep], other: str) -> float:
    return sweeps[QUIRE].sustained() / sweeps[other].sustained()


def _gains(effort: Effort, by_method: dict[Method, dict[str, Sweep]]) -> Figure:
    methods = list(by_method)
    bar_positions = [float(index) for index in range(len(methods))]
    curves = [
        Curve(
            f"over {other}", bar_positions, [_ratio(by_method[method], other) for method in methods]
        )
        for other in (ORCA_ORACLE, ORCA_POW2)
    ]
    one, six = (_ratio(by_method[method], ORCA_ORACLE) for method in (methods[0], methods[-1]))
    findings = [near("rate over Orca (Oracle), one sample", one, 1.3)]
    if effort.is_full:  # a trace of a few seconds does not load a system that serves beams
        ratios = [_ratio(by_method[method], ORCA_ORACLE) for method in methods]
        samples, beams = ratios[1 : 1 + len(NUMS)], ratios[1 + len(NUMS) :]
        findings += [
            near("rate over Orca (Oracle), beam search of width 6", six, 2.3),
            near("gain of beams over the gain of one sample", six / one, 1.77),
            order("smallest ratio of neighbours, 6, 4 and 2 samples", falling(samples[::-1]),
                  0.97, 3, "more with more samples", "the order; 3 % for equal gains"),
            order("smallest ratio of neighbours, 6, 4 and 2 beams", falling(beams[::-1]),
                  0.97, 3, "more with wider beams", "the order; 3 % for equal gains"),
            order("gain of 6 beams over that of 6 samples", six / samples[-1], 1.1, 3,
                  "even greater", "at least a tenth more"),
        ]  # fmt: skip
    text = (
        "Paging gains more if the sequences of a request share more. How much beams share depends"
        " on the model's certainty; candidates are drawn as in `benchmarks/memory/sharing.py`. The"
        " simulation does not include Orca's cost of copying the context of a replaced beam. In a"
        " step, 5 to 9 % of the beams are replaced. One sample gains more than in the paper, whose"
        " batches"
        " of a hundred short requests took longer than the formula says. So beams gain less over"
        " it."
    )
    return Figure(
        "fig_14",
        "Gain from sharing: OPT-13B, Alpaca-like",
        "P fig. 14, 6.3",
        "",
        "sustained rate of quire over that of",
        curves,
        findings,
        text,
        BARS,
        [_label(method) for method in methods],
    )


def _label(method: Method) -> str:
    return method.name if method.num == 1 else f"{method.num} {method.name}"


def _panel(method: Method, sweeps: dict[str, Sweep]) -> Figure:
    highest = 1.15 * max(each.sustained(1.0) for each in sweeps.values())
    return Figure(
        f"fig_14_{method.name}_{method.num}",
        f"Latency against rate: {_label(method)}, OPT-13B, Alpaca-like",
        "P fig. 14",
        "requests per second",
        "normalized latency (s per token)",
        [each.curve.up_to(highest) for each in sweeps.values()],
        y_limit=1.0,
    )


def _savings(effort: Effort, runs: Runs, methods: list[Method]) -> Figure:
    workloads, seconds = (ALPACA, SHAREGPT), max(effort.seconds / 5, MIN_SAVING_S)
    cases = [
        (QUIRE, OPT_13B, Load(workload, SAVING_RATE[workload.name], seconds, method))
        for workload in workloads
        for method in methods
    ]
    found = run_each(runs, serve, cases)
    bar_positions = [float(index) for index in range(len(methods))]
    curves: list[Curve] = []
    findings: list[Finding] = []
    for index, workload in enumerate(workloads):
        mine = found[index * len(methods) : (index + 1) * len(methods)]
        curves.append(Curve(workload.name, bar_positions, [100 * each.saved for each in mine]))
        for method, served in zip(methods, mine, strict=True):
            published = SAVED[workload.name, method.is_beams].get(method.num)
            if published is not None:
                label = f"blocks saved, {_label(method)}, {workload.name}"
                findings.append(near(label, 100 * served.saved, published, unit=" %"))
    text = (
        "Saved blocks, as a share of the blocks without sharing. The paper gives the range from 2"
        " to 6 sequences. Samples share only their prompt, so their savings follow from the"
        " lengths, of which the paper gives only the means (`benchmarks/memory/sharing.py` has the"
        " formula). The blocks that beams share depend on the model."
    )
    return Figure(
        "fig_15",
        "Blocks saved by sharing: OPT-13B",
        "P fig. 15, 6.3",
        "",
        "% of the blocks without sharing",
        curves,
        findings,
        text,
        BARS,
        [_label(method) for method in methods],
    )
