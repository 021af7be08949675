"""The writers of each state, checked on the source: no state has two owners, and imports have no
cycle."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from quire.kv.manager import KVManager
from quire.scheduler.core.sequence import RowTable
from tests.structure.test_house import PACKAGE, sources

SCHEDULER = PACKAGE / "scheduler"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path, modules: set[str]) -> set[str]:
    """Return the modules of the package that a file imports at any level, including for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module or ""}
            found |= {node.module or ""} if names - modules else set()
    return found & modules - {module_of(path)}


def test_imports_have_no_cycle() -> None:
    modules = {module_of(path): path for path in sources(PACKAGE)}
    graph = {name: imported(path, set(modules)) for name, path in modules.items()}
    del graph["quire"]  # its names are imported when they are first used
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"these import each other: {error.args[1]}") from error


def assignments(path: Path) -> Iterator[ast.expr]:
    """Yield the targets of a file's assignments, and their parts."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Assign):
            yield from (each for target in node.targets for each in ast.walk(target))
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            yield node.target


def test_only_rows_assigns_to_columns() -> None:
    columns = set(vars(RowTable(1, 1))) - {"num_rows"}
    for path in sources(SCHEDULER):
        found = {
            target.value.attr
            for target in assignments(path)
            if isinstance(target, ast.Subscript)
            and isinstance(target.value, ast.Attribute)
            and not (isinstance(target.value.value, ast.Name) and target.value.value.id == "self")
        }
        assert path.name == "rows.py" or not found & columns, f"{path.name}: {found & columns}"


def test_only_lifecycle_assigns_to_states() -> None:
    """Only lifecycle changes the queue as well; policies belong to the queue."""
    for path in sources(SCHEDULER):
        attributes = {t.attr for t in assignments(path) if isinstance(t, ast.Attribute)}
        changes = {
            node.func.attr
            for node in ast.walk(ast.parse(path.read_text("utf-8")))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value).endswith("queue")
        }
        if path.name not in ("lifecycle.py", "sequence.py"):
            assert not attributes & {"state", "finish_reason"}, path.name
            is_policy = path.name in ("queue.py", "fifo.py", "srtf.py", "two_level.py")
            assert is_policy or not changes & {"push", "requeue", "remove"}, path.name


def test_only_memory_uses_pools() -> None:
    """The rest of the scheduler asks the memory whether a need fits."""
    assert {"pools", "host_pools"} <= set(vars(KVManager((), (), 4)))
    for path in sources(SCHEDULER):
        text = path.read_text("utf-8")
        uses = [
            node.attr
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Attribute) and node.attr in ("pools", "host_pools")
        ]
        assert path.name in ("memory.py", "miss_report.py", "index_changes.py") or not uses, (
            path.name
        )


def test_no_part_of_the_scheduler_takes_the_whole_scheduler() -> None:
    for path in sources(SCHEDULER):
        if path.name == "scheduler.py":
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.arg) and node.annotation is not None:
                assert "Scheduler" not in ast.unparse(node.annotation).split("."), path.name
