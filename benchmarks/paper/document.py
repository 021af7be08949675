"""Write the evaluation's pages in docs/results and draw their plots."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.paper.figure import BARS, Curve, Figure
from benchmarks.paper.pages import pages_of

matplotlib.use("svg")
STYLE = {
    "svg.hashsalt": "quire",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "figure.constrained_layout.use": True,
}
PLAIN = FuncFormatter(lambda value, _: f"{value:g}")
SIZE = (6.4, 3.2)  # inches
MARKERS = "os^Dv*Px"


def write_document(made: dict[str, list[Figure]], folder: Path) -> None:
    """Write evaluation*.md and evaluation/NAME.svg into a folder. made: by module."""
    plots = folder / "evaluation"
    plots.mkdir(parents=True, exist_ok=True)
    for figures in made.values():
        for figure in figures:
            if figure.curves:
                draw(figure, plots / f"{figure.name}.svg")
    for name, text in pages_of(made).items():
        (folder / name).write_text(text, encoding="utf-8")


def draw(figure: Figure, path: Path) -> None:
    """Draw a figure as SVG: the same bytes for the same numbers."""
    with plt.rc_context(STYLE):
        plot, axes = plt.subplots(figsize=SIZE)
        if figure.kind == BARS:
            _draw_bars(axes, figure)
        else:
            _draw_lines(axes, figure.curves)
        axes.set_xlabel(figure.x_label)
        axes.set_ylabel(figure.y_label)
        if figure.is_log_x:
            axes.set_xscale("log")
            axes.set_xticks(figure.curves[0].x)
            axes.xaxis.set_major_formatter(PLAIN)
            axes.xaxis.set_minor_formatter(NullFormatter())
        if figure.is_log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(PLAIN)
            axes.yaxis.set_minor_formatter(NullFormatter())
        elif figure.y_limit is not None:
            axes.set_ylim(0, figure.y_limit)
        else:
            axes.set_ylim(bottom=0)
        columns = 3 if len(figure.curves) > 1 else 1
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, fontsize=8, frameon=False
        )
        plot.savefig(path, format="svg", metadata={"Date": None})
        plt.close(plot)


def _draw_lines(axes: Any, curves: Sequence[Curve]) -> None:
    for number, curve in enumerate(curves):
        style = {"linestyle": "none", "markersize": 9, "fillstyle": "none"}
        axes.plot(
            curve.x, curve.y, MARKERS[number % len(MARKERS)], label=curve.label,
            **(style if curve.is_published else {"linestyle": "-", "markersize": 4}),
        )  # fmt: skip


def _draw_bars(axes: Any, figure: Figure) -> None:
    width = 0.8 / len(figure.curves)
    for number, curve in enumerate(figure.curves):
        at = [x + (number - (len(figure.curves) - 1) / 2) * width for x in curve.x]
        look = {"fill": False, "hatch": "//"} if curve.is_published else {}
        axes.bar(at, curve.y, width, label=curve.label, **look)
    axes.set_xticks(range(len(figure.names)), figure.names)
