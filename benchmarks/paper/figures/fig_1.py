"""P fig. 1 (right): how the batch, the memory and the throughput grow with each other."""

from benchmarks.paper.bands import within
from benchmarks.paper.figure import Curve, Effort, Figure, Runs, run_each
from benchmarks.paper.settings import OPT_13B, Load
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, QUIRE, serve
from quire.tools.workloads import SHAREGPT

SYSTEMS = (QUIRE, ORCA_ORACLE, ORCA_MAX)
RATES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
FEW_RATES = (1.0, 4.0)


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure."""
    rates = RATES if effort.is_full else FEW_RATES
    seconds = effort.seconds / 4
    cases = [
        (system, OPT_13B, Load(SHAREGPT, rate, seconds)) for system in SYSTEMS for rate in rates
    ]
    found = run_each(runs, serve, cases)
    num = len(rates)
    by_name = {
        system: found[index * num : (index + 1) * num] for index, system in enumerate(SYSTEMS)
    }
    curves = [
        Curve(name, [each.batched for each in mine], [each.tokens_per_s for each in mine])
        for name, mine in by_name.items()
    ]
    fastest = {name: max(each.tokens_per_s for each in mine) for name, mine in by_name.items()}
    ratio = fastest[QUIRE] / fastest[ORCA_MAX]
    text = (
        "All systems lie on one curve. A step reads the weights once for all its requests, so"
        " tokens per second follow the batch. Memory ends the curves of the other systems early."
    )
    return [
        Figure(
            "fig_1",
            "Throughput by batch size: OPT-13B, ShareGPT-like",
            "P fig. 1, T fig. 3.1",
            "requests in a step, mean",
            "output tokens per second",
            curves,
            [within("peak tokens/s, quire over Orca (Max)", ratio, 2, 4)],
            text,
            seconds=seconds,
        )
    ]
