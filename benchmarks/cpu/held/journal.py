"""The file of a comparison that can be stopped and resumed: a JSON line for each process.

The first line holds what must not change between two parts of a comparison.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.processes import Run

Key = tuple[str, str, int]  # engine, workload, round


@dataclass
class Journal:
    """All results so far. Each new entry is appended at once."""

    path: Path
    head: Mapping[str, Any]
    done: dict[Key, list[Run]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)

    def open(self) -> None:
        """Read the file, or begin it. A last line that was cut off is dropped.

        Raises SystemExit if the file is of another comparison."""
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"head": dict(self.head)})
            return
        whole, _, _ = self.path.read_text(encoding="utf-8").rpartition("\n")
        self.path.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
        first, *entries = [json.loads(line) for line in whole.splitlines()] or [{}]
        if first.get("head") != dict(self.head):
            raise SystemExit(
                f"{self.path} was begun with {first.get('head')}, this is {dict(self.head)};"
                " name another file with --journal"
            )
        for entry in entries:
            self._take(entry)

    def add_runs(self, key: Key, runs: list[Run]) -> None:
        self.done[key] = runs
        self._append({"key": list(key), "runs": [asdict(run) for run in runs]})

    def add_failure(self, name: str, reason: str) -> None:
        self.failures[name] = reason
        self._append({"failed": name, "reason": reason})

    def add_ceilings(self, found: Mapping[str, dict[str, float]]) -> None:
        self.ceilings = dict(found)
        self._append({"ceilings": self.ceilings})

    def runs(self) -> list[Run]:
        """Return all runs, in the order in which they were measured."""
        return [run for runs in self.done.values() for run in runs]

    def _take(self, entry: Mapping[str, Any]) -> None:
        if "key" in entry:
            engine, workload, round_ = entry["key"]
            self.done[engine, workload, round_] = [Run(**run) for run in entry["runs"]]
        elif "failed" in entry:
            self.failures[entry["failed"]] = entry["reason"]
        elif "ceilings" in entry:
            self.ceilings = entry["ceilings"]

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
