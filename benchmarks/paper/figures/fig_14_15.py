"""P fig. 14 and 15: several samples and beams of one prompt, which share its blocks.

The blocks that quire saves are simulated with its own scheduler and beam search. The rates of full
systems follow by formula from these savings (`capacity.py`), since whole searches at each rate take
long to simulate.
"""

from benchmarks.paper.bands import ANY, falling, near, order
from benchmarks.paper.capacity import Capacity, gain
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Finding, Runs, run_each
from benchmarks.paper.settings import OPT_13B, Load, Method
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, QUIRE, REPLACED, Served, serve
from quire.tools.workloads import ALPACA, SHAREGPT

NUMS = (2, 4, 6)
ONE = Method()
SAVING_RATE = {ALPACA.name: 4.0, SHAREGPT.name: 0.3}  # for which the memory is enough
MIN_SAVING_S = 40.0  # of a trace: a shorter one is not in a steady state
SAVED = {  # P 6.3: %, of 2 and of 6 sequences
    (ALPACA.name, False): {2: 6.1, 6: 9.8},
    (SHAREGPT.name, False): {2: 16.2, 6: 30.5},
    (ALPACA.name, True): {2: 37.6, 6: 55.2},
    (SHAREGPT.name, True): {2: 44.3, 6: 66.3},
}
PUBLISHED = (1.3, 2.3)  # over Orca (Oracle): one sample, and six beams


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the bars of gains and of savings."""
    nums = NUMS if effort.is_full else (NUMS[-1],)
    methods = [
        Method("beams" if is_beams else "samples", num, is_beams)
        for is_beams in (False, True)
        for num in nums
    ]
    savings = _savings(effort, runs, methods)
    return [_gains(methods, [share / 100 for share in savings.curves[0].y]), savings]


def _gains(methods: list[Method], saved: list[float]) -> Figure:
    """Make the bars of gains. saved: shares of the blocks, by method."""
    all_methods, shares = [ONE, *methods], [0.0, *saved]
    ours = [
        Capacity(QUIRE, OPT_13B, ALPACA, method, saved=share)
        for method, share in zip(all_methods, shares, strict=True)
    ]
    ratios = [gain(each, ORCA_ORACLE) for each in ours]
    positions = [float(index) for index in range(len(all_methods))]
    curves = [
        Curve("over Orca (Oracle)", positions, ratios),
        Curve(
            "published, over Orca (Oracle)", [positions[0], positions[-1]], list(PUBLISHED), True
        ),
    ]
    one, six = ratios[0], ratios[-1]
    samples = [r for r, method in zip(ratios, all_methods, strict=True) if not method.is_beams]
    beams = [r for r, method in zip(ratios, all_methods, strict=True) if method.is_beams]
    to_max = [gain(each, ORCA_MAX) for each in ours]
    findings = [
        near("rate over Orca (Oracle), one sample", one, PUBLISHED[0]),
        near("rate over Orca (Oracle), beam search of width 6", six, PUBLISHED[1]),
        near("gain of beams over the gain of one sample", six / one, 1.77),
        order("smallest ratio of neighbours, most to fewest samples", falling(samples[::-1]),
              0.97, ANY, "more with more samples", "the order; 3 % for equal gains"),
        order("gain of 6 beams over that of 6 samples", six / samples[-1], 1.1, ANY,
              "even greater", "at least a tenth more"),
        order("smallest gain over Orca (Max)", min(to_max), 2.0, ANY, "",
              "twice at least: Orca (Max) has seven sequences"),
    ]  # fmt: skip
    if len(beams) > 1:
        findings.append(
            order("smallest ratio of neighbours, most to fewest beams", falling(beams[::-1]),
                  0.97, ANY, "more with wider beams", "the order; 3 % for equal gains")
        )  # fmt: skip
    low, high = min(REPLACED.values()), max(REPLACED.values())
    text = (
        "By formula, from the blocks that quire saves (fig. 15). The host samples one request after"
        " the other, so beams cost it less than as many requests. Orca copies the keys and values"
        f" of replaced beams (P 4.4): in a step, {low:.1%} to {high:.1%} of the beams, as counted"
        " in quire's searches."
    )
    return Figure(
        "fig_14",
        "Gain from sharing: OPT-13B, Alpaca-like",
        "P fig. 14, 6.3",
        "",
        "sustained rate of quire over that of Orca (Oracle)",
        curves,
        findings,
        text,
        BARS,
        [_label(method) for method in all_methods],
    )


def _label(method: Method) -> str:
    return method.name if method.num == 1 else f"{method.num} {method.name}"


def _replaced(method: Method, served: Served) -> Finding:
    """Check the share of replaced beams that the formula of Orca's copies takes."""
    taken = 100 * REPLACED[method.num]
    return order(f"beams replaced in a step, {_label(method)}, {ALPACA.name}",
                 100 * served.replaced, 0.95 * taken, 1.05 * taken, "",
                 "5 %: the formula of Orca's copies takes the middle", " %")  # fmt: skip


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
        shown = {
            position: published
            for position, method in zip(bar_positions, methods, strict=True)
            if (published := SAVED[workload.name, method.is_beams].get(method.num)) is not None
        }
        label = f"published, {workload.name}"
        curves.append(Curve(label, [*shown], [*shown.values()], is_published=True))
        for method, served in zip(methods, mine, strict=True):
            published = SAVED[workload.name, method.is_beams].get(method.num)
            if published is not None:
                label = f"blocks saved, {_label(method)}, {workload.name}"
                findings.append(near(label, 100 * served.saved, published, unit=" %"))
            if workload is ALPACA and method.is_beams:
                findings.append(_replaced(method, served))
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
        seconds=seconds,
    )
