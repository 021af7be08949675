"""The core depends on no feature: names in the loop, and calls of the scheduler."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from quire.engine.loop.core import EngineCore
from tests.structure.test_house import PACKAGE, imports, sources, tree_of

LOOP = PACKAGE / "engine" / "loop"
CORE = LOOP / "core.py"
MAX_CORE_LINES, MAX_LOOP_LINES = 310, 1200

# Words in names of features. Drafts are part of plans and results, so they are allowed.
FEATURES = {
    "store", "stores", "grammar", "grammars", "recorder", "recording", "live", "connector",
    "connectors", "loading", "preparation", "drafting", "drafter", "publisher", "router", "queued",
}  # fmt: skip
# Modules of this package that files of the loop may import.
ALLOWED = (
    "quire.base.", "quire.engine.loop.", "quire.engine.executors.executor",
    "quire.runner.setup.step_size", "quire.scheduler.decisions", "quire.scheduler.scheduler",
    "quire.scheduler.views",
)  # fmt: skip

DOORS = {"add", "control", "schedule", "update"}
QUESTIONS = {"has", "requests", "view", "prefixes", "held", "live_state", "drafts.candidates"}
SUBSCRIBING = {"subscribe", "note_names"}
RESTORING = {"continue_with"}


def words(name: str) -> set[str]:
    """Return the words of an identifier, in lower case."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def names(path: Path) -> Iterator[str]:
    """Yield all identifiers of a file, and the modules that it imports."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")


def test_loop_is_short() -> None:
    assert len(CORE.read_text("utf-8").splitlines()) <= MAX_CORE_LINES
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in sources(LOOP))
    assert lines <= MAX_LOOP_LINES, f"{lines} lines in engine/loop"


def test_loop_names_no_feature() -> None:
    for path in sources(LOOP):
        found = {name for name in names(path) if words(name) & FEATURES}
        assert not found, f"{path.name} names {found}"


def test_loop_imports_no_feature() -> None:
    for path in sources(LOOP):
        own = {name for name in imports(path) if name.startswith("quire")}
        found = {name for name in own if not name.startswith(ALLOWED)}
        assert not found, f"{path.name} imports {found}"


def test_loop_has_no_other_optional_attributes() -> None:
    """An attribute that may be None would be a feature that may be off, with three exceptions."""
    optional = {
        target.attr
        for path in (CORE, LOOP / "front.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.AnnAssign) and "None" in ast.unparse(node.annotation)
        for target in [node.target]
        if isinstance(target, ast.Attribute)
    }
    assert optional == {"_carried_over", "_due_s", "_death"}


def chain(node: ast.expr) -> list[str]:
    """Return the names of an expression such as a.b.c, as far as it has this form."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)]


def after_scheduler(node: ast.expr) -> str | None:
    """Return the names after `scheduler` in an expression such as core.scheduler.memory.kv."""
    parts = chain(node)
    at = next((i for i, part in enumerate(parts) if part in ("scheduler", "_scheduler")), None)
    return None if at is None else ".".join(parts[at + 1 :]) or None


def outside_the_scheduler() -> list[Path]:
    return [path for path in sources(PACKAGE) if PACKAGE / "scheduler" not in path.parents]


def test_only_public_methods_of_the_scheduler_are_called() -> None:
    called = set()
    for path in outside_the_scheduler():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and (name := after_scheduler(node.func)):
                called.add(name)
                known = DOORS | QUESTIONS | SUBSCRIBING | RESTORING
                assert name in known, f"{path.name} calls scheduler.{name}"
    assert called == DOORS | QUESTIONS | SUBSCRIBING | RESTORING, "a name in these sets is outdated"


def test_only_the_scheduler_assigns_to_its_state() -> None:
    for path in outside_the_scheduler():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    name = after_scheduler(target)
                    assert name is None, f"{path.name} assigns to scheduler.{name}"


def test_loop_has_its_own_four_doors() -> None:
    """All attachments are notified of calls through them."""
    assert set(vars(EngineCore.__mro__[1])) >= DOORS
