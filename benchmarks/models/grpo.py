"""Let the demo model learn a rule by GRPO (examples/grpo.py), and draw how the reward rises.

    python -m benchmarks.models.grpo --output-json FILE --picture docs/figures/grpo.svg
    python -m benchmarks.models.grpo --read FILE --picture docs/figures/grpo.svg

Options of the example, such as --steps, pass through. Each row has a batch's rewards, the KL
between trainer and engine, and the CPU seconds of the process so far. The engine runs in the same
process, so these include its own.
"""

import importlib.util
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import result_files
from quire.tools.report import benchmark_parser, print_head

EXAMPLES = Path(__file__).parents[2] / "examples"
WINDOW = 5  # batches of the mean that the picture and the tests show
Rows = list[dict[str, Any]]


def example(name: str) -> Any:
    """Return one of the examples as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def learn(given: Sequence[str]) -> tuple[dict[str, Any], Rows]:
    """Train with the example's options; return all its settings, and a row for each batch."""
    grpo, rows = example("grpo"), Rows()
    arguments = grpo.parse(list(given))
    for number, batch in enumerate(grpo.train(arguments), start=1):
        rows.append({"batch": number, **asdict(batch), "cpu_s": round(time.process_time(), 1)})
        print(rows[-1], flush=True)
    return vars(arguments), rows


def mean_reward(rows: Rows, begin: int, end: int | None = None) -> float:
    """Return the mean reward of some batches."""
    rewards = [float(row["reward"]) for row in rows[begin:end]]
    return sum(rewards) / len(rewards)


def draw(rows: Rows, path: Path) -> None:
    """Draw the rewards as SVG: the same bytes for the same numbers."""
    from benchmarks.paper.document import draw as draw_figure
    from benchmarks.paper.figure import Curve, Figure

    batches = [float(row["batch"]) for row in rows]
    means = [mean_reward(rows, max(0, end - WINDOW), end) for end in range(1, len(rows) + 1)]
    curves = [
        Curve("mean reward of a batch", batches, [float(row["reward"]) for row in rows]),
        Curve(f"mean of the last {WINDOW} batches", batches, means),
        Curve("share of stories with reward 1", batches, [row["best_share"] for row in rows]),
    ]
    labels = {"x_label": "batch", "y_label": "reward"}
    draw_figure(Figure("grpo", "GRPO", "", curves=curves, y_limit=1.0, **labels), path)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--read", type=Path, help="draw the rows of this result file; do not train")
    parser.add_argument("--picture", type=Path, help="write the curve there, as SVG")
    options, others = parser.parse_known_args()
    if options.read is None:
        print_head("GRPO with the demo model")
        settings, rows = learn(others)
        result_files.write(options.output_json, "models.grpo", rows, settings)
    else:
        rows = result_files.read(options.read).rows
    print(
        f"reward: {mean_reward(rows, 0, WINDOW):.2f} in the first {WINDOW} batches,"
        f" {mean_reward(rows, -WINDOW):.2f} in the last {WINDOW}"
    )
    if options.picture is not None:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
