"""T 4.6: how long a device waits for its host, with one plan in flight and with more: measured."""

from benchmarks.paper.bands import ANY, order
from benchmarks.paper.figure import BARS, Curve, Effort, Figure, Runs
from benchmarks.result_files import newest

PATHS = {"server": "quire serve", "client": "LLM"}


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure of the last results of `benchmarks.scheduler.async_scheduling`."""
    measured = newest("async_scheduling").rows
    num_rows = max(each["rows"] for each in measured)
    rows = [each for each in measured if each["rows"] == num_rows]
    cases = sorted({(each["path"], each["step_ms"]) for each in rows}, reverse=True)
    by_depth: dict[int, list[float]] = {}
    for depth in sorted({each["depth"] for each in rows}):
        by_depth[depth] = [
            100
            * next(
                each["idle"]
                for each in rows
                if (each["path"], each["step_ms"], each["depth"]) == (*case, depth)
            )
            for case in cases
        ]
    bar_positions = [float(index) for index in range(len(cases))]
    served = cases.index(("server", min(each["step_ms"] for each in rows)))
    findings = [
        order("device idle, one plan in flight, quire serve", by_depth[1][served], 2, ANY, "",
              "more than with two: the host's work shows when nothing hides it", " %"),
        order("device idle, two plans in flight, quire serve", by_depth[2][served], 0, 2,
              "minimised", "2 %: what a timer of the operating system may be late", " %"),
    ]  # fmt: skip
    text = (
        f"Measured with {num_rows} decoding rows. The device is a timer; the core, its scheduler"
        " and its messages are real (`benchmarks/scheduler/async_scheduling.py`). The thesis says"
        " that scheduling one step ahead hides the host's work behind the device's. Its fig. 4.6"
        " compares execution modes on H100s; `make gpu-check` measures these."
    )
    return [
        Figure(
            "host_time",
            "Idle time of the device",
            "T 4.6.1, fig. 4.3",
            "",
            "% of the time that the device is idle",
            [Curve(f"{depth} in flight", bar_positions, mine) for depth, mine in by_depth.items()],
            findings,
            text,
            BARS,
            [f"{PATHS[path]}, steps of {step} ms" for path, step in cases],
        )
    ]
