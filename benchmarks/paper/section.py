"""The section of a figure on its page, and its numbers as rows of a result file."""

import math
import textwrap
from dataclasses import asdict, fields
from typing import Any

from benchmarks.paper.figure import Curve, Figure, Finding, Rates
from benchmarks.paper.sweep import LIMIT_S
from benchmarks.result_files import Row

WIDTH = 120  # of a line of text
RULE = (
    f"The sustained rate is the lower of two rates: where the latency reaches {LIMIT_S:g} s per"
    " token, and what a full system serves. In requests per second:"
)


def section(figure: Figure) -> str:
    """Return the section of a figure."""
    traces = "" if figure.seconds is None else f". Traces of {figure.seconds:g} s."
    lines = [f"## {figure.title}", "", f"*{figure.source}*{traces}", ""]
    if figure.curves:
        lines += [f"![{figure.title}](evaluation/{figure.name}.svg)", ""]
    if figure.findings:
        lines += ["| | quire | paper | band | shows | why this band |", "|---|---|---|---|---|---|"]
        lines += [_row(finding) for finding in figure.findings]
        lines.append("")
    if figure.text:
        lines += [wrapped(figure.text.strip()), ""]
    if figure.rates:
        lines += [wrapped(RULE), "", "| system | latency limit | full system | sustained |"]
        lines += ["|---|---|---|---|", *map(_rates, figure.rates), ""]
    return "\n".join(lines)


def _rates(rates: Rates) -> str:
    crossing = "not reached" if rates.crossing is None else shown(rates.crossing)
    cells = (rates.system, crossing, shown(rates.throughput), shown(rates.sustained))
    return f"| {' | '.join(cells)} |"


def wrapped(text: str, indent: str = "") -> str:
    """Return a text whose paragraphs fit the page; tables stay as they are. indent: of a
    paragraph's lines after its first one."""
    unbroken = textwrap.TextWrapper(
        WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    lines: list[str] = []
    for line in text.splitlines():
        is_table = line.startswith("|")
        lines += [line] if is_table or not line else unbroken.wrap(line)
    return "\n".join(lines)


def _row(finding: Finding) -> str:
    outside = "" if finding.holds else " (outside)"
    ours = f"{shown(finding.ours)}{finding.unit}"
    cells = (finding.what, ours + outside, finding.published, _band(finding), finding.standing,
             finding.why)  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _band(finding: Finding) -> str:
    """Return the band; no quantity of these pages is negative."""
    if math.isinf(finding.high):
        return f"at least {shown(finding.low)}"
    if finding.low <= 0:
        return f"at most {shown(finding.high)}"
    return f"{shown(finding.low)} to {shown(finding.high)}"


def shown(value: float) -> str:
    """Return a number with three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rows_of(figures: dict[str, list[Figure]]) -> list[Row]:
    """Return the numbers of all figures, by module: a row for each figure, curve,
    finding, and system of a sweep."""
    rows: list[Row] = []
    for module, made in figures.items():
        for figure in made:
            labels = {"module": module, "figure": figure.name}
            own = {field.name: getattr(figure, field.name) for field in fields(figure)}
            curves, findings, rates = (own.pop(each) for each in ("curves", "findings", "rates"))
            rows.append({"row": "figure", **labels, **own})
            rows += [{"row": "curve", **labels, **asdict(curve)} for curve in curves]
            rows += [{"row": "finding", **labels, **asdict(finding)} for finding in findings]
            rows += [{"row": "rates", **labels, **asdict(each)} for each in rates]
    return [{name: _finite(value) for name, value in row.items()} for row in rows]


def figures_of(rows: list[Row]) -> dict[str, list[Figure]]:
    """Return the figures of which `rows_of` made rows."""
    found: dict[str, list[Figure]] = {}
    for row in rows:
        given = {n: v for n, v in row.items() if n not in ("row", "figure", "module")}
        kind, figures = row["row"], found.setdefault(row["module"], [])
        if kind == "figure":
            figures.append(Figure(**given))
        elif kind == "curve":
            figures[-1].curves.append(Curve(**given))
        elif kind == "rates":
            figures[-1].rates.append(Rates(**given))
        else:
            bounds = {name: _number(given[name]) for name in ("ours", "low", "high")}
            figures[-1].findings.append(Finding(**given | bounds))
    return found


def _finite(value: Any) -> Any:
    """Return a value for JSON, which has no infinite numbers: they become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | str) -> float:
    return float(value) if isinstance(value, str) else value
