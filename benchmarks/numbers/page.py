"""Render docs/results/numbers.md: the tables of a catalogue, filled from the result files.

A cell is a template such as `{ms.add.median*1e3:.1f} us`: the name of a row's field, a factor if it
has one, a format. A list is the same figure of several rounds: its median, or with `@min` and
`@max` the least and the most. The format `sig` shows three digits or all before the point. A run's
settings are fields named `settings.NAME`. A cell of which a field is missing stays empty.
"""

import string
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.result_files import Result, Row

BEGIN = "<!-- made by python -m benchmarks.numbers: begin -->"
END = "<!-- made by python -m benchmarks.numbers: end -->"
CHOICES: dict[str, Callable[[list[float]], float]] = {"": median, "min": min, "max": max}
WIDTH = 120  # of a line of text


@dataclass(frozen=True)
class Table:
    """The rows of one result file that `where` chooses: a value, or several, for each field.

    With `by` the table is turned: rows that have the same first cell share a line, and each value
    of that field is a column with `cell` in it. headings: of these columns, in their order.
    is_full: lines with an empty cell are left out.
    """

    file: str  # below benchmarks/results
    columns: dict[str, str]  # heading: template
    where: dict[str, Any] = field(default_factory=dict)
    by: str = ""
    cell: str = ""
    headings: dict[Any, str] = field(default_factory=dict)
    is_full: bool = False


@dataclass(frozen=True)
class Section:
    """One benchmark. about: what is measured, and against which aim or limit."""

    title: str
    about: str
    command: str
    tables: tuple[Table, ...]


@dataclass(frozen=True)
class Part:
    """Sections that belong together."""

    title: str
    sections: tuple[Section, ...]
    about: str = ""


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
    wanted = {name: v if isinstance(v, tuple) else (v,) for name, v in where.items()}
    settings = {f"settings.{name}": value for name, value in result.settings.items()}
    rows = [row for row in result.rows if all(row.get(n) in v for n, v in wanted.items())]
    return [settings | row for row in rows]


def lines_of(table: Table, result: Result) -> list[str]:
    """Return a table as Markdown, and where its figures are from."""
    rows = chosen(result, table.where)
    if not rows:
        raise ValueError(f"{table.file} has no row with {table.where}; correct the catalogue.")
    cells = [[filled(t, row) for t in table.columns.values()] for row in rows]
    head = list(table.columns)
    if table.by:
        head, cells = _turned(table, rows)
    if table.is_full:
        cells = [line for line in cells if all(line)]
    if not all(any(column) for column in zip(*cells, strict=True)):
        raise ValueError(f"{table.file}: a column of {head} is empty; correct the catalogue.")
    body = [head, ["---"] * len(head), *cells]
    folder, commit, date = table.file.split("/")[0], result.commit, result.date[:10]
    source = f"[{table.file}](../../benchmarks/results/{table.file})"
    return [
        *("| " + " | ".join(each) + " |" for each in body), "",
        f"{folder}, commit {commit}, {date}: {source}", "",
    ]  # fmt: skip


def _turned(table: Table, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    headings = table.headings or {row[table.by]: str(row[table.by]) for row in rows}
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        first = tuple(filled(t, row) for t in table.columns.values())
        lines.setdefault(first, {})[row[table.by]] = filled(table.cell, row)
    cells = [[*first, *(line.get(key, "") for key in headings)] for first, line in lines.items()]
    return [*table.columns, *headings.values()], cells


def wrapped(text: str) -> list[str]:
    """Return a text in lines that fit."""
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False)


def generated(parts: tuple[Part, ...], results: Mapping[str, Result]) -> str:
    """Return all parts as Markdown."""
    lines = []
    for part in parts:
        lines += [f"## {part.title}", "", *([*wrapped(part.about), ""] if part.about else [])]
        for section in part.sections:
            lines += [
                f"### {section.title}",
                "",
                *wrapped(section.about),
                "",
                f"`{section.command}`",
                "",
            ]
            for table in section.tables:
                lines += lines_of(table, results[table.file])
    return "\n".join([*lines, *_machines(results)])


def _machines(results: Mapping[str, Result]) -> list[str]:
    """Return a table of the machines, as the newest result of each says."""
    newest: dict[str, Result] = {}
    for name, result in sorted(results.items(), key=lambda item: item[1].date):
        newest[name.split("/")[0]] = result
    lines = ["## Machines", "", "| name | processor | cores | GPU | torch |"]
    lines.append("|---|---|---|---|---|")
    for name, result in sorted(newest.items()):
        facts = result.machine
        cells = (facts["cpu"], facts["cores"], facts.get("gpu") or "", facts.get("torch") or "")
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return [*lines, ""]


def updated(page: str, text: str) -> str:
    """Return a page with new text between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}; put them back.")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"
