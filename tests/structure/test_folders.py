"""Folders: few files and a budget of lines in each, and no two import each other.

A list of exceptions here may only shrink. A budget is raised by a commit of its own that says why.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.structure.test_core import FEATURES, names, words
from tests.structure.test_house import PACKAGE, sources
from tests.structure.test_owners import imported, module_of

MAX_FILES = 15  # of a folder, without its __init__.py
# Folders that have more.
CROWDED = {
    "base": 57,
    "cli": 24,
    "models": 53,
    "models/hf": 17,
    "ops": 49,
    "ops/attention": 24,
    "ops/kernels": 33,
    "render": 37,
    "runner": 26,
    "serve": 30,
    "serve/api": 49,
    "serve/api/batches": 17,
}
# Lines of a folder's own files.
BUDGETS = {
    "base": 8360,
    "base/media": 300,
    "cli": 3050,
    "cli/options": 1000,
    "engine": 50,
    "engine/attachments": 1550,
    "engine/client": 1860,
    "engine/connectors": 2050,
    "engine/drafting": 1400,
    "engine/executors": 650,
    "engine/grammars": 750,
    "engine/loop": 1200,
    "engine/observability": 1800,
    "engine/ranks": 3200,
    "engine/ranks/ray": 500,
    "engine/recording": 900,
    "engine/start": 800,
    "engine/wire": 990,
    "kv": 1830,
    "models": 6500,
    "models/gguf": 750,
    "models/hf": 2800,
    "models/multimodal": 180,
    "models/quantised": 1000,
    "models/vision": 1840,
    "ops": 6150,
    "ops/attention": 3450,
    "ops/collectives": 500,
    "ops/kernels": 8300,
    "plugins": 280,
    "render": 4900,
    "render/answers": 2150,
    "render/media": 1660,
    "runner": 5345,
    "runner/gpu": 1000,
    "runner/media": 410,
    "runner/warm": 880,
    "scheduler": 1620,
    "scheduler/branching": 400,
    "scheduler/core": 3700,
    "scheduler/media": 380,
    "scheduler/policy": 300,
    "scheduler/reuse": 1950,
    "serve": 5150,
    "serve/api": 8450,
    "serve/api/batches": 2400,
    "serve/api/messages": 900,
    "serve/api/responses": 1850,
    "serve/api/several": 600,
    "serve/media": 890,
    "serve/several": 1100,
    "tools": 2830,
    "tools/bench": 1850,
    "tools/port": 550,
    "tools/simulate": 2470,
    "tools/verify": 1500,
}
# The three folders that one reads to know how quire schedules.
CORE = ("scheduler/core", "kv", "engine/loop")
MAX_CORE_LINES = 6630
# Features that the scheduler's core knows nothing of.
OF_THE_CORE = FEATURES - {"queued"} | {"pin", "pins", "pinned", "held", "holds", "retained", "keep"}


def name_of(folder: Path) -> str:
    return folder.relative_to(PACKAGE).as_posix()


def lines_of(folder: str) -> int:
    paths = (PACKAGE / folder).glob("*.py")
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def folders() -> list[str]:
    return sorted({name_of(path.parent) for path in sources(PACKAGE)} - {"."})


@pytest.mark.parametrize("folder", folders())
def test_a_folder_holds_few_files(folder: str) -> None:
    num = len([path for path in (PACKAGE / folder).glob("*.py") if path.name != "__init__.py"])
    assert num <= CROWDED.get(folder, MAX_FILES)
    assert folder not in CROWDED or num > MAX_FILES, "take it off the list"


@pytest.mark.parametrize("folder", folders())
def test_a_folder_keeps_its_budget(folder: str) -> None:
    assert folder in BUDGETS, "give a new folder a budget"
    assert lines_of(folder) <= BUDGETS[folder]


def test_the_core_can_be_read_in_a_day() -> None:
    assert sum(map(lines_of, CORE)) <= MAX_CORE_LINES


def circles() -> set[tuple[str, str]]:
    modules = {module_of(path): path for path in sources(PACKAGE)}
    arrows: Counter[tuple[str, str]] = Counter()
    for path in modules.values():
        for found in imported(path, set(modules)):
            one, other = name_of(path.parent), name_of(modules[found].parent)
            is_nested = f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
            if not is_nested and "." not in (one, other):
                arrows[one, other] += 1
    return {pair for pair in arrows if pair[::-1] in arrows and pair < pair[::-1]}


def test_no_two_folders_import_each_other() -> None:
    """Though neither is in the other."""
    assert not circles()


def test_the_schedulers_core_imports_no_feature() -> None:
    modules = {module_of(path): path for path in sources(PACKAGE)}
    for path in sources(PACKAGE / "scheduler" / "core"):
        found = {name_of(modules[name].parent) for name in imported(path, set(modules))}
        assert found <= {"base", "kv", "scheduler", "scheduler/core"}, path.name


def test_the_schedulers_core_names_no_feature() -> None:
    """But in messages that clients read, and in comments."""
    for path in sources(PACKAGE / "scheduler" / "core"):
        found = {name for name in names(path) if words(name) & OF_THE_CORE}
        assert found <= ALLOWED_NAMES, f"{path.name} names {found - ALLOWED_NAMES}"


# Vocabulary of requests and of the row table, which other meanings of these words have.
ALLOWED_NAMES = {
    "GrammarReady", "GrammarTaken", "grammar",  # of a request, which waits until it is ready
    "is_held_back", "keep_s", "pin_s",  # of requests
    "live", "live_blocks",  # of block tables
    "_states_to_keep", "has_held", "held", "holds", "is_held", "keep_states",
    "loading_is_cheaper",
}  # fmt: skip


def test_attributes_of_the_core_are_always_there() -> None:
    """An attribute that may be None would be a feature that may be off."""
    optional = {
        node.target.attr
        for path in sources(PACKAGE / "scheduler" / "core")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and re.search(r"\| None$", ast.unparse(node.annotation))
    }
    assert optional == {"new"}, "where names are noted, if somebody wants them"
