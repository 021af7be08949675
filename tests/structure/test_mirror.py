"""Each large file of src has tests: tests/ROOM/test_NAME.py, tests in tests/ROOM that import it, or
a test whose docstring names it as covered."""

import ast
import functools
from pathlib import Path

import pytest

from tests.structure.test_house import LAYERS, PACKAGE, ROOT, imports, sources, tree_of

TESTS = ROOT / "tests"
# Folders that belong to no room: tests of other folders of the repository, or of all rooms.
OTHERS = {
    "benchmarks",
    "clients",
    "csrc",
    "docs",
    "golden",
    "gpu",
    "kernels",
    "mutation",
    "pairs",
    "structure",
    "support",
}
ALSO = {"ops": [TESTS / "kernels"]}
LARGE = 100  # lines; smaller modules are tested with those that use them


def large_modules() -> list[Path]:
    found = [path for path in sources(PACKAGE) if path.parent != PACKAGE]
    return [path for path in found if len(path.read_text("utf-8").splitlines()) > LARGE]


def covering(module: Path) -> list[Path]:
    """Return the test files that a change of the module should run first."""
    where = module.relative_to(PACKAGE)
    room = sources(TESTS / where.parts[0], *ALSO.get(where.parts[0], []))
    dotted = "quire." + ".".join(where.with_suffix("").parts)
    return (
        [path for path in room if path.name == f"test_{where.name}"]
        or [path for path in room if dotted in imports_of(path)]
        or [path for path in sources(TESTS) if f"`{where}`" in purpose(path)]
    )


@functools.cache
def imports_of(path: Path) -> set[str]:
    return set(imports(path))


@functools.cache
def purpose(path: Path) -> str:
    return ast.get_docstring(tree_of(path)) or ""


@pytest.mark.parametrize("module", large_modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_module_has_tests_in_its_room(module: Path) -> None:
    where = module.relative_to(PACKAGE)
    assert covering(module), (
        f"no file in tests/{where.parts[0]} is called test_{where.name} or imports {where}, and no"
        f" test's docstring says that it covers `{where}`"
    )


def test_test_folders_are_rooms() -> None:
    folders = {path.name for path in TESTS.iterdir() if (path / "__init__.py").exists()}
    assert folders <= LAYERS.keys() | OTHERS
