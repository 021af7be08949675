"""How far simulations are from real runs that they have not seen: measured."""

from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Finding, Runs
from benchmarks.result_files import newest


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make a figure of what `benchmarks.scheduler.fidelity` measured last."""
    found = newest("fidelity")
    measured, settings = found.rows, found.settings
    aims = {n.removeprefix("aims."): aim for n, aim in settings.items() if n.startswith("aims.")}
    names = [f"{each['model'].removeprefix('shape:')}, {each['workload']}" for each in measured]
    places = [float(index) for index in range(len(names))]
    curves = [
        Curve(name, places, [100 * abs(each[f"off.{name}"]) for each in measured]) for name in aims
    ]
    lines = [
        "| | real (least to most) | simulated | off |",
        "|---|---|---|---|",
    ]
    keys = {"TTFT mean": "ttft_mean", "TTFT median": "ttft_median", "TTFT p99": "ttft_p99",
            "tokens/s": "tokens_per_s", "TPOT mean": "tpot_mean"}  # fmt: skip
    met = total = 0
    for name, each in zip(names, measured, strict=True):
        for what, key in keys.items():
            low, middle, high = each[f"spread.{what}"]
            ours, off = each[f"simulated.{key}"], each[f"off.{what}"]
            if what != "TPOT mean":
                total += 1
                met += abs(off) <= aims[what] if what in aims else low <= ours <= high
            lines.append(
                f"| {name}: {what} | {middle:.1f} ({low:.1f} to {high:.1f}) | {ours:.1f} |"
                f" {off:+.1%} |"
            )
    text = "\n".join(
        [
            "Measured on two cores of a CPU: an engine is calibrated, by batches and by requests",
            "that come one by one, then three workloads that it has not seen are served for real",
            f"and by the simulator. Of {total} aims (throughput within 10 %, mean and median TTFT",
            "within 15 %, the 99th percentile within the real runs' spread)",
            f"{met} are met. Times in ms.",
            "",
            *lines,
        ]
    )
    worst = max(abs(each["off.tokens/s"]) for each in measured)
    return [
        Figure(
            "fidelity",
            "Simulated and real",
            "beyond the papers",
            "",
            "% off",
            curves,
            [Finding("throughput, furthest off", 100 * worst, 0, 10, "", " %")],
            text,
            BARS,
            [name.replace(", ", "\n") for name in names],
        )
    ]
