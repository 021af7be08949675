"""P fig. 18 a: attention over blocks against contiguous memory: measured, on a CPU.

The paper compares its GPU kernel with FasterTransformer's. quire's CPU kernel is compared with
itself, over blocks of 16 and over one block for each row. `benchmarks.kernels.attention` measures.
"""

from benchmarks.paper.bands import order
from benchmarks.paper.figure import Curve, Effort, Figure, Runs
from benchmarks.result_files import FOLDER, Result, read

PUBLISHED = (1.20, 1.26)  # times as long as over contiguous memory


def measured() -> Result:
    """Return the newest results that have both ways of attention."""
    found = [read(path) for path in sorted(FOLDER.glob("*/attention.json"))]
    return max((each for each in found if each.where(part="paged")), key=lambda each: each.date)


def figures(effort: Effort, runs: Runs) -> list[Figure]:
    """Make the figure of the last results."""
    found = measured()
    rows = found.where(part="paged")
    contexts = [float(row["case"].rsplit(" ", 1)[1].replace(",", "")) for row in rows]
    times = [row["layer_us"] / row["other_us"] for row in rows]
    low, high = PUBLISHED
    findings = [
        order("latency of attention, blocks of 16 over one block, most", max(times), 0.0, high,
              f"{low:g} to {high:g}", "not above the published cost of blocks"),
    ]  # fmt: skip
    text = (
        f"Measured on {found.machine['cpu']}, {found.machine['cores']} cores, with 16 rows. Over"
        f" blocks, quire's CPU kernel takes {min(times):.2f} to {max(times):.2f} times as long. The"
        " paper compares its GPU kernel with another engine's, which is not repeated here: the"
        " simulations take that number as an input."
        " [CPU kernels](cpu-kernels.md#ways-of-attention) has the times."
    )
    return [
        Figure(
            "fig_18a",
            "Attention over blocks, measured",
            "P fig. 18 a, 7.1",
            "tokens of a row",
            "latency over blocks of 16 over that of one block",
            [Curve("quire's CPU kernel", contexts, times)],
            findings,
            text,
            is_log_x=True,
        )
    ]
