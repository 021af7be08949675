"""The table of docs/results/clients.md: a row for each client, from its last run with `--write`.

A run of some clients replaces their rows. A client without a recorded run has a row without counts.
The text outside of the marks does not change.
"""

from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.environments import CLIENTS, ROOT, requirements

PAGE = ROOT / "docs" / "results" / "clients.md"
BEGIN = '<!-- clients: written by `make test-clients ARGS="--write"` -->'
END = "<!-- clients: end -->"
UNRECORDED = "no recorded run"
HEAD = "| client | version | cases | passed | what differs |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Row:
    """Result of one client's cases. notes: reasons of cases that were skipped or differ."""

    client: str
    version: str
    total: int
    passed: int
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        cells = self.version, str(self.total), str(self.passed), "; ".join(self.notes)
        return _line(self.client, *cells)


def _line(client: str, *cells: str) -> str:
    link = f"[{client}](../../tests/clients/{client}_cases.py)"
    shown = (" ".join(cell.split()).replace("|", "\\|") for cell in (link, *cells))
    return "| " + " | ".join(shown) + " |"


def _without_run(client: str) -> str:
    return _line(client, requirements(client).splitlines()[1], "", "", UNRECORDED)


def rows_of(text: str) -> dict[str, str]:
    """Return a page's rows by client. Raises ValueError for a page without the marks."""
    _, begin, rest = text.partition(BEGIN)
    table, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN} and {END}, between which the rows go.")
    lines = [line for line in table.splitlines() if line.startswith("| [")]
    return {line.removeprefix("| [").partition("]")[0]: line for line in lines}


def page(text: str, rows: list[Row]) -> str:
    """Return a page with these rows instead of the clients' earlier ones."""
    found = rows_of(text) | {row.client: str(row) for row in rows}
    lines = [found.get(client) or _without_run(client) for client in CLIENTS]
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    return f"{before}{BEGIN}\n\n{HEAD}" + "\n".join(lines) + f"\n\n{END}{after}"


def write(rows: list[Row], path: Path = PAGE) -> None:
    path.write_text(page(path.read_text("utf-8"), rows), "utf-8")
