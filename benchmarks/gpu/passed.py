"""Which tests have passed on which kind of device, and with which sources.

    {"NVIDIA H200": {"tests/kernels/test_norm.py": {"sources": "3f...", "passed": 37, "date": ...}}}

`tests/gpu/passed.json` is committed. A check on a device writes it there, and into its archive as
passed.json, to be copied from a machine that is not the developer's. A file of tests has changed if
the hash of its sources has. The sources are the test, its imports below tests/, and all modules of
`quire.ops` and `quire.runner` that it reaches. All other modules are tested without a device.

Only the standard library is used, so that this works whatever else is broken.
"""

import ast
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "gpu" / "passed.json"
HASHED = ("src/quire/ops/", "src/quire/runner/", "tests/")
ROOTS = {"quire": ROOT / "src", "tests": ROOT}
Record = dict[str, dict[str, dict[str, str | int]]]


@dataclass
class Passed:
    """The record of one kind of device. paths: files that hold it; all are read and written."""

    device: str
    paths: tuple[Path, ...] = (FILE,)
    record: Record = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.paths:
            for device, files in read(path).items():
                self.record.setdefault(device, {}).update(files)

    def has_changed(self, file: str) -> bool:
        """Return whether a file of tests has not passed here with its present sources."""
        entry = self.record.get(self.device, {}).get(file)
        return entry is None or entry["sources"] != sources_hash(ROOT / file)

    def add(self, file: str, num_passed: int) -> None:
        """Note that all tests of a file have passed, and write it at once."""
        self.record.setdefault(self.device, {})[file] = {
            "sources": sources_hash(ROOT / file),
            "passed": num_passed,
            "date": datetime.now(UTC).date().isoformat(),
        }
        text = json.dumps(self.record, indent=1, sort_keys=True) + "\n"
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(text, encoding="utf-8")
            os.replace(unfinished, path)


def read(path: Path) -> Record:
    """Return a record; an empty one if there is none."""
    try:
        found: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def sources_hash(test: Path) -> str:
    """Return a hash of the sources that decide whether a file of tests passes on a device."""
    folders = [folder for folder in test.parents if folder.is_relative_to(ROOT / "tests")]
    waiting = [test, *(folder / "conftest.py" for folder in folders)]
    reached: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in reached and path.is_file():
            reached.add(path)
            waiting += imported(path)
    found = hashlib.sha256()
    for name in sorted(path.relative_to(ROOT).as_posix() for path in reached):
        if name.startswith(HASHED):
            found.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return found.hexdigest()[:16]


@cache
def imported(path: Path) -> tuple[Path, ...]:
    """Return the files of this repository that a file may import, also within its functions and by
    `kernels_for`."""
    return tuple(
        file for name in _names(path) for file in _files(name) if file != path and file.is_file()
    )


def _names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "kernels_for":
            named = [each.value for each in node.args if isinstance(each, ast.Constant)]
            yield from (f"quire.ops.kernels.{name}" for name in named if isinstance(name, str))


def _files(name: str) -> tuple[Path, ...]:
    parts = name.split(".")
    if parts[0] not in ROOTS:
        return ()
    base = ROOTS[parts[0]].joinpath(*parts)
    return base.with_suffix(".py"), base / "__init__.py"
