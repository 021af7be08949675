"""Render the pages of numbers in docs/results: tables of a catalogue, filled from result files.

A cell is a template such as `{ms.add.median*1e3:.1f} us`: the name of a row's field, a factor if
it has one, a format. A list holds the same figure of several rounds: the cell shows its median, or
with `@min` and `@max` the least and the most. The format `sig` shows three digits, or all before
the point. A run's settings are fields named `settings.NAME`. A cell stays empty if a field is
missing.
"""

import string
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.result_files import Result, Row

ZEN3, ZEN4, ZEN5 = "epyc-zen3-2/", "epyc-zen4-2/", "epyc-zen5-2/"
OVERVIEW = "numbers.md"
MARK = "<!-- made by python -m benchmarks.numbers -->"
CHOICES: dict[str, Callable[[list[float]], float]] = {"": median, "min": min, "max": max}
WIDTH = 120  # of a line of text


INTRODUCTION = """\
This page shows the most telling measurements. The pages that it links to have all of them, each
with the command that repeats it. Weights are random, decoding is greedy and sequences do not end
early, unless a section says otherwise. Speed on a CPU is that of two cores."""
MEASURING = (
    "`make bench-cpu` compares the engines on this CPU. `make gpu-check` measures a GPU.",
    "`make bench-all` runs most benchmarks and writes their result files into a folder for this"
    " machine.",
    "`python -m benchmarks.numbers` writes these pages from the files in"
    " [benchmarks/results](../../benchmarks/results).",
    "A commit with `+` had uncommitted changes. Figures are rounded if their file names printed"
    " output as its source. `benchmarks/result_files.py` documents the form of these files.",
    "[The papers' evaluation](evaluation.md) repeats the figures of the PagedAttention paper in"
    " simulations.",
)


@dataclass(frozen=True)
class Table:
    """The rows of one result file that `where` chooses: a value, or several, for each field.

    With `by` the table is turned: rows with the same first cells share a line. Each value of that
    field is a column with `cell` in it. headings: the titles of these columns, in order.
    """

    file: str  # below benchmarks/results
    columns: dict[str, str]  # heading: template
    where: dict[str, Any] = field(default_factory=dict)
    by: str = ""
    cell: str = ""
    headings: dict[Any, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """One benchmark. about: what is measured, and against which aim or limit."""

    title: str
    about: str
    command: str
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Page:
    """One page of docs/results."""

    name: str
    title: str
    sections: tuple[Section, ...]
    about: str


@dataclass(frozen=True)
class Value:
    """A cell of the one row of a file that has these values."""

    file: str
    cell: str
    where: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Highlight:
    """A row of the overview: quire's values, and what they are compared with."""

    subject: str
    page: Page
    ours: tuple[Value, ...]
    others: tuple[Value, ...]
    compared_with: str


class _Cells(string.Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        name, _, factor = field_name.partition("*")
        name, _, choice = name.partition("@")
        value = kwargs[name]
        if value is None:
            raise KeyError(name)
        if isinstance(value, list) and value and not isinstance(value[0], str):
            value = CHOICES[choice](value)
        if isinstance(value, bool):
            value = "yes" if value else "no"
        return (value * float(factor) if factor else value), name

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "sig":
            format_spec = ",.0f" if abs(value) >= 100 else ".3g"
        return format(value, format_spec)


def filled(template: str, row: Mapping[str, Any]) -> str:
    """Return a template with a row's figures; empty if the row has not all of them."""
    try:
        return _Cells().vformat(template, (), row)
    except KeyError:
        return ""


def chosen(result: Result, where: Mapping[str, Any]) -> list[Row]:
    """Return the rows with these values."""
    selected = {name: v if isinstance(v, tuple) else (v,) for name, v in where.items()}
    settings = {f"settings.{name}": value for name, value in result.settings.items()}
    rows = [row for row in result.rows if all(row.get(n) in v for n, v in selected.items())]
    return [settings | row for row in rows]


def lines_of(table: Table, result: Result) -> list[str]:
    """Return a table as Markdown."""
    rows = chosen(result, table.where)
    if not rows:
        raise ValueError(f"{table.file} has no row with {table.where}; correct the catalogue.")
    cells = [[filled(t, row) for t in table.columns.values()] for row in rows]
    head = list(table.columns)
    if table.by:
        head, cells = _turned(table, rows)
    if not all(any(column) for column in zip(*cells, strict=True)):
        raise ValueError(f"{table.file}: a column of {head} is empty; correct the catalogue.")
    body = [head, ["---"] * len(head), *cells]
    return [*("| " + " | ".join(each) + " |" for each in body), ""]


def source_of(file: str, result: Result) -> list[str]:
    """Return the lines that say where a table's figures are from."""
    folder, name = file.split("/")
    link = f"[{name}](../../benchmarks/results/{file})"
    return [f"{link}, {folder}, {result.date[:10]}, {result.commit}", ""]


def _turned(table: Table, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    headings = table.headings or {row[table.by]: str(row[table.by]) for row in rows}
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        first = tuple(filled(t, row) for t in table.columns.values())
        lines.setdefault(first, {})[row[table.by]] = filled(table.cell, row)
    cells = [[*first, *(line.get(key, "") for key in headings)] for first, line in lines.items()]
    return [*table.columns, *headings.values()], cells


def wrapped(text: str, bullet: str = "") -> list[str]:
    """Return a text in lines that fit."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=bullet,
        subsequent_indent=" " * len(bullet),
        break_on_hyphens=False,
        break_long_words=False,
    )


def pages_of(
    pages: Sequence[Page], highlights: Sequence[Highlight], results: Mapping[str, Result]
) -> dict[str, str]:
    """Return the text of all pages by file name, the overview first."""
    texts = {OVERVIEW: _overview(pages, highlights, results)}
    return texts | {page.name: _page(page, results) for page in pages}


def _page(page: Page, results: Mapping[str, Result]) -> str:
    lines = [MARK, f"# {page.title}", ""]
    lines += wrapped(
        f"This page shows {page.about[0].lower()}{page.about[1:]} [Numbers]({OVERVIEW}) describes"
        " the machines and how to measure."
    )
    lines.append("")
    for section in page.sections:
        lines += [f"## {section.title}", "", *wrapped(section.about), ""]
        lines += [f"`{section.command}`", ""]
        for table, after in zip(section.tables, [*section.tables[1:], None], strict=True):
            lines += lines_of(table, results[table.file])
            if after is None or after.file != table.file:
                lines += source_of(table.file, results[table.file])
    return "\n".join(lines)


def _overview(
    pages: Sequence[Page], highlights: Sequence[Highlight], results: Mapping[str, Result]
) -> str:
    lines = [MARK, "# Numbers", "", *wrapped(INTRODUCTION), ""]
    lines += ["| what | quire | compared with | page |", "|---|---|---|---|"]
    for each in highlights:
        ours, others = (
            ", ".join(value_of(value, results) for value in values)
            for values in (each.ours, each.others)
        )
        compared = f"{others} ({each.compared_with})" if others else each.compared_with
        link = f"[{each.page.name.removesuffix('.md')}]({each.page.name})"
        lines.append(f"| {each.subject} | {ours} | {compared} | {link} |")
    lines += ["", "## Pages", ""]
    for page in pages:
        lines += wrapped(f"[{page.name.removesuffix('.md')}]({page.name}): {page.about}", "- ")
    lines += ["", *_machines(results), "## Measure again", ""]
    for item in MEASURING:
        lines += wrapped(item, "- ")
    return "\n".join([*lines, ""])


def value_of(value: Value, results: Mapping[str, Result]) -> str:
    """Return the cell of a value."""
    rows = chosen(results[value.file], value.where)
    if len(rows) != 1:
        raise ValueError(f"{value.file} has {len(rows)} rows with {value.where}; name one.")
    return filled(value.cell, rows[0])


def _machines(results: Mapping[str, Result]) -> list[str]:
    """Return a table of the machines, by the newest result of each that has a fact."""
    newest: dict[str, dict[str, Any]] = {}
    for name, result in sorted(results.items(), key=lambda item: item[1].date):
        known = {key: fact for key, fact in result.machine.items() if fact is not None}
        newest.setdefault(name.split("/")[0], {}).update(known)
    lines = ["## Machines", "", "| name | processor | cores | GPU | torch |"]
    lines.append("|---|---|---|---|---|")
    for name, facts in sorted(newest.items()):
        cells = (facts["cpu"], facts["cores"], facts.get("gpu") or "", facts.get("torch") or "")
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return [*lines, ""]
