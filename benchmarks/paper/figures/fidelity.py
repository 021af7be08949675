"""How far simulations are from real runs that they have not seen: measured."""

from benchmarks.paper.bands import order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Runs
from benchmarks.result_files import newest

KEYS = {
    "TTFT mean": "ttft_mean",
    "TTFT median": "ttft_median",
    "TTFT p99": "ttft_p99",
    "tokens/s": "tokens_per_s",
}


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make a figure of the last results of `benchmarks.scheduler.fidelity`."""
    found = newest("fidelity")
    measured, settings = found.rows, found.settings
    aims = {n.removeprefix("aims."): aim for n, aim in settings.items() if n.startswith("aims.")}
    names = [f"{each['model'].removeprefix('shape:')}, {each['workload']}" for each in measured]
    bar_positions = [float(index) for index in range(len(names))]
    curves = [
        Curve(name, bar_positions, [100 * abs(each[f"off.{name}"]) for each in measured])
        for name in aims
    ]
    met = total = 0
    for each in measured:
        for quantity, key in KEYS.items():
            low, _, high = each[f"spread.{quantity}"]
            ours, off = each[f"simulated.{key}"], each[f"off.{quantity}"]
            total += 1
            met += abs(off) <= aims[quantity] if quantity in aims else low <= ours <= high
    text = (
        "Measured on two cores of a CPU. An engine is calibrated with batches and with single"
        " requests. Then it serves three workloads that the calibration has not seen, and the"
        f" simulator serves the same. Of {total} aims {met} are met: throughput within 10 %, mean"
        " and median TTFT within 15 %, the 99th percentile within the spread of the real runs."
        " [Scheduler](scheduler.md#simulations-compared-with-real-runs) has the figures."
    )
    worst = max(abs(each["off.tokens/s"]) for each in measured)
    return [
        Figure(
            "fidelity",
            "Simulations and real runs",
            "beyond the papers",
            "",
            "% off",
            curves,
            [
                order(
                    "throughput, largest deviation",
                    100 * worst,
                    0,
                    100 * aims["tokens/s"],
                    "",
                    "the aim of throughput",
                    " %",
                )
            ],  # fmt: skip
            text,
            BARS,
            [name.replace(", ", "\n") for name in names],
        )
    ]
