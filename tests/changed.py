"""`make test-changed`: run the tests that a change touches, and the house's rules.

    python -m tests.changed [--since REVISION] [--list] [PYTEST'S FLAGS]

A change is a difference from REVISION (HEAD): committed since, in the work tree, or new. A changed
Python file touches the test files that import it, also through other files below tests/. It also
touches the test files that cover it (tests/structure/test_mirror.py). Any other file touches the
test files that contain its name. A change of C++ touches tests/ops. A change of a file that all
tests share, such as tests/conftest.py or pyproject.toml, touches all. This cannot see a module that
is used through another one; `make test` runs all tests.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path

from tests.structure.test_house import PACKAGE, ROOT, sources, tree_of
from tests.structure.test_mirror import TESTS, covering

SHARED = ("tests/conftest.py", "pyproject.toml", "Makefile")
RULES = TESTS / "structure"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.changed", description=__doc__)
    parser.add_argument("--since", default="HEAD", metavar="REVISION", help="default: HEAD")
    parser.add_argument("--list", action="store_true", help="print the test files, run none")
    given, flags = parser.parse_known_args()
    names = changed_files(given.since)
    found = touched(names)
    print(f"{len(names)} changed files, {len(found)} test files", flush=True)
    if given.list:
        print("\n".join(str(path.relative_to(ROOT)) for path in found))
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", *flags]
    return subprocess.run([*command, *map(str, [RULES, *found])], cwd=ROOT).returncode


def changed_files(revision: str) -> list[str]:
    """Return the paths that differ from a revision, relative to the repository's root."""
    commands = ["diff", "--name-only", revision], ["ls-files", "--others", "--exclude-standard"]
    found: set[str] = set()
    for command in commands:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"git {' '.join(command)}: {done.stderr.strip()}")
        found |= set(done.stdout.splitlines())
    return sorted(found)


def touched(names: Collection[str]) -> list[Path]:
    """Return the test files that changed files touch, without the house's rules."""
    files = [path for path in sources(TESTS) if path.name.startswith("test_")]
    files = [path for path in files if RULES not in path.parents]
    if any(name in SHARED for name in names):
        return files
    reasons = [_reason(name) for name in names]
    return [path for path in files if any(is_touched(path) for is_touched in reasons)]


def _reason(name: str) -> Callable[[Path], bool]:
    """Return what says whether a changed file touches a test file."""
    path = ROOT / name
    if name.startswith("csrc/"):
        return lambda test: TESTS / "ops" in test.parents
    if path.suffix != ".py":
        return lambda test: Path(name).name in test.read_text("utf-8")
    dotted = ".".join(path.relative_to(_root_of(path)).with_suffix("").parts)
    dotted = dotted.removesuffix(".__init__")
    is_module = PACKAGE in path.parents and path.parent != PACKAGE
    covered = set(covering(path)) if is_module and path.exists() else set()
    return lambda test: test == path or test in covered or dotted in reached(test)


def _root_of(path: Path) -> Path:
    return PACKAGE.parent if PACKAGE in path.parents else ROOT


@cache
def reached(path: Path) -> frozenset[str]:
    """Return the modules that a test file imports, itself or through files below tests/."""
    found, waiting = set[str](), [path]
    while waiting:
        for name in set(_imported(waiting.pop())) - found:
            found.add(name)
            helper = ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if name.startswith("tests.") and helper.exists():
                waiting.append(helper)
    return frozenset(found)


def _imported(path: Path) -> Iterator[str]:
    """Yield the dotted names of what a file imports: modules, and names that may be modules."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    sys.exit(main())
