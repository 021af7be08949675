"""Write, read and check the result files of all benchmarks: one form, a folder for each machine.

    benchmarks/results/epyc-zen4-2/cpu.json
    {"benchmark", "commit", "date", "machine", "settings", "rows"}

A row is a flat object. Nested figures become dotted names with their unit, such as
`ms.schedule.median`; a list holds the same figure of several rounds.
`python -m benchmarks.result_files` prints the name of this machine's folder.
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.base.errors import ConfigError
from quire.tools.report import machine_facts, plain_facts

FOLDER = Path(__file__).parent / "results"
# The family and model of /proc/cpuinfo, and the processor's common name.
PROCESSORS = {
    "family 25, model 1": "epyc-zen3",
    "family 25, model 17": "epyc-zen4",
    "family 26, model 2": "epyc-zen5",
    "family 6, model 207": "xeon-amx",
}
VIRTUAL = {"cpu": "virtual time", "cores": 0}  # the machine of simulations
Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """One run of one benchmark."""

    benchmark: str  # the module in `benchmarks`, such as `cpu.drafts`
    commit: str  # with "+" if the checkout had changes
    date: str  # ISO 8601
    machine: dict[str, Any]  # cpu, cores, and versions of the programs
    settings: dict[str, Any]  # options of the run, and what was measured once for all rows
    rows: list[Row]

    def where(self, **criteria: Any) -> list[Row]:
        """Return the rows that have these values."""
        return [row for row in self.rows if criteria.items() <= _hashable(row).items()]


def _hashable(row: Row) -> Row:
    return {name: value for name, value in row.items() if not isinstance(value, list)}


def flat(entry: Mapping[str, Any], before: str = "") -> Row:
    """Return an object whose nested objects are dotted names, without infinite numbers."""
    found: Row = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[f"{before}{name}"] = _finite(value)
    return found


def _finite(value: Any) -> Any:
    """Return a value for JSON, which has only finite numbers: other figures are missing."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def keyed(column: str, table: Mapping[Any, Mapping[str, Any]]) -> list[Row]:
    """Return a table by key as rows that have the key in a column."""
    return [{column: key, **entry} for key, entry in table.items()]


def columns(entries: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the figures of several rounds as one list for each name."""
    listed = list(entries)
    return {name: [entry[name] for entry in listed] for name in (listed[0] if listed else {})}


def options_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a run as settings."""
    given = {name: value for name, value in vars(options).items() if name != "output_json"}
    return {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}


def write(
    path: Path | None,
    benchmark: str,
    rows: Iterable[Mapping[str, Any]],
    settings: Mapping[str, Any],
    facts: Callable[[], dict[str, Any]] = machine_facts,
) -> None:
    """Write a run's rows, if a path is given. Raises ConfigError."""
    if path is None:
        return
    machine = facts()
    commit, date = machine.pop("commit", None) or "unknown", machine.pop("date")
    found = Result(benchmark, commit, date, machine, flat(settings), [flat(row) for row in rows])
    wrong = problems(json.loads(as_text(found)))
    assert not wrong, f"{benchmark}: {wrong[0]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_text(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the results cannot be written to {path}: {error.strerror}.") from error


def as_text(result: Result) -> str:
    """Return a file's text: a line for each row, so that a diff shows which changed."""
    head = asdict(result)
    rows = ",\n".join("  " + json.dumps(row) for row in head.pop("rows"))
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "rows": [\n{rows}\n ]\n}}\n'


def read(path: Path) -> Result:
    """Read a result file. Raises ConfigError if it has not the form."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    wrong = problems(data)
    if wrong:
        raise ConfigError(f"{path}: {wrong[0]}; benchmarks/result_files.py has the form.")
    return Result(**data)


def read_all(folder: Path = FOLDER) -> dict[str, Result]:
    """Read all result files, by their paths below the folder."""
    return {p.relative_to(folder).as_posix(): read(p) for p in sorted(folder.rglob("*.json"))}


def newest(name: str, folder: Path = FOLDER) -> Result:
    """Read the file of this name that was measured last, on any machine."""
    return max((read(path) for path in folder.glob(f"*/{name}.json")), key=lambda each: each.date)


def problems(data: Any) -> list[str]:
    """Return what differs from the form."""
    names = [field.name for field in fields(Result)]
    if not isinstance(data, dict) or sorted(data) != sorted(names):
        return [f"it must have exactly the fields {', '.join(names)}"]
    return [*_head_problems(data), *_row_problems(data)]


def _head_problems(data: dict[str, Any]) -> Iterator[str]:
    for name in ("benchmark", "commit", "date"):
        if not isinstance(data[name], str) or not data[name]:
            yield f"{name} must be text, not {data[name]!r}"
    try:
        datetime.fromisoformat(str(data["date"]))
    except ValueError:
        yield f"date must be ISO 8601, not {data['date']!r}"
    for name in ("machine", "settings"):
        if not isinstance(data[name], dict) or not all(map(_is_value, data[name].values())):
            yield f"{name} must be a flat object"
    if not isinstance(data["machine"], dict) or not {"cpu", "cores"} <= data["machine"].keys():
        yield "machine must have cpu and cores"


def _row_problems(data: dict[str, Any]) -> Iterator[str]:
    if not isinstance(data["rows"], list) or not data["rows"]:
        yield "rows must be a list that is not empty"
        return
    for number, row in enumerate(data["rows"]):
        if not isinstance(row, dict):
            yield f"row {number} must be an object, not {row!r}"
            continue
        for name, value in row.items():
            if not _is_value(value):
                yield f"row {number}, {name}: {value!r} is no finite number, text or list of these"


def _is_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(not isinstance(each, list) and _is_value(each) for each in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def machine_name(machine: Mapping[str, Any]) -> str:
    """Return the name of a machine's folder, such as epyc-zen4-2: its GPU, or CPU and cores."""
    if machine.get("gpu"):
        return _slug(str(machine["gpu"]).removeprefix("NVIDIA "))
    cpu, cores = str(machine["cpu"]), machine["cores"]
    known = [name for key, name in PROCESSORS.items() if f"({key})" in cpu]
    return f"{known[0] if known else _slug(cpu)}-{cores}" if cores else _slug(cpu)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    print(machine_name(plain_facts()))
