"""Folders: each has few files and a budget of lines, and no two folders import each other.

A budget is raised by a commit of its own that says why.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.structure.test_core import FEATURES, names, words
from tests.structure.test_house import PACKAGE, sources
from tests.structure.test_owners import imported, module_of

MAX_FILES = 15  # in a folder, without its __init__.py
# Lines of a folder's own files.
BUDGETS = {
    "base": 1850,
    "base/requests": 1500,
    "base/settings": 1940,
    "cli": 1530,
    "cli/chat": 580,
    "cli/commands": 1670,
    "cli/launch": 600,
    "cli/local": 400,
    "cli/options": 860,
    "engine": 10,
    "engine/attachments": 2150,
    "engine/client": 2400,
    "engine/connectors": 2150,
    "engine/drafting": 1995,
    "engine/executors": 640,
    "engine/grammars": 860,
    "engine/loop": 1190,
    "engine/observability": 1820,
    "engine/ranks": 3600,
    "engine/ranks/ray": 480,
    "engine/recording": 870,
    "engine/start": 1170,
    "engine/wire": 1080,
    "kv": 2000,
    "models": 1290,
    "models/checkpoint": 1170,
    "models/encoders": 260,
    "models/deepseek": 160,
    "models/families": 990,
    "models/gguf": 1260,
    "models/hf": 2760,
    "models/library": 920,
    "models/load": 2140,
    "models/multimodal": 180,
    "models/parts": 2270,
    "models/quantised": 990,
    "models/qwen": 260,
    "models/vision": 1820,
    "ops": 1500,
    "ops/attention": 3380,
    "ops/blocks": 660,
    "ops/collectives": 430,
    "ops/host": 960,
    "ops/kernels": 4120,
    "ops/kernels/attention": 4340,
    "ops/kernels/products": 830,
    "ops/kernels/sampling": 2100,
    "ops/prompt_kernels": 340,
    "ops/rows": 350,
    "ops/sampling": 1220,
    "ops/trace": 960,
    "ops/weights": 2150,
    "plugins": 280,
    "render": 610,
    "render/answers": 2130,
    "render/grammars": 990,
    "render/jobs": 550,
    "render/media": 1640,
    "render/templates": 960,
    "render/tokens": 2020,
    "runner": 3730,
    "runner/drafting": 1010,
    "runner/gpu": 2150,
    "runner/media": 420,
    "runner/sampling": 1120,
    "runner/setup": 790,
    "runner/warm": 1070,
    "scheduler": 1900,
    "scheduler/branching": 390,
    "scheduler/core": 3830,
    "scheduler/media": 390,
    "scheduler/policy": 350,
    "scheduler/reuse": 2760,
    "serve": 2965,
    "serve/anthropic": 950,
    "serve/batches": 2320,
    "serve/bodies": 1810,
    "serve/hooks": 490,
    "serve/http": 1150,
    "serve/llamacpp": 740,
    "serve/lmstudio": 210,
    "serve/media": 900,
    "serve/native": 2510,
    "serve/observers": 750,
    "serve/ollama": 930,
    "serve/openai": 810,
    "serve/pipeline": 2220,
    "serve/processes": 1340,
    "serve/python": 1990,
    "serve/responses": 1820,
    "serve/several": 1700,
    "serve/rollouts": 670,
    "serve/sglang": 520,
    "spec": 3160,
    "spec/deepseek": 290,
    "spec/gguf": 1270,
    "tools": 2510,
    "tools/bench": 2600,
    "tools/port": 520,
    "tools/simulate": 2710,
    "tools/sizing": 720,
    "tools/verify": 1690,
    "training": 780,
    "vllm": 1690,
}
# The package without tools, plug-ins and the translation of transformers' classes. The aims are 520
# files and 90,000 lines.
MAX_TRUNK_FILES, MAX_TRUNK_LINES = 908, 132_840
OUTSIDE_THE_TRUNK = ("tools", "plugins", "models/hf")
# Folders that the scheduler's core may import.
ALLOWED_FOLDERS = {
    "base", "base/requests", "base/settings", "kv", "scheduler", "scheduler/core", "spec",
}  # fmt: skip
# The three folders that define how quire schedules.
CORE = ("scheduler/core", "kv", "engine/loop")
MAX_CORE_LINES = 7_000
# Features that the scheduler's core must not name.
OF_THE_CORE = FEATURES - {"queued"} | {"pin", "pins", "pinned", "held", "holds", "retained", "keep"}


def name_of(folder: Path) -> str:
    return folder.relative_to(PACKAGE).as_posix()


def lines_of(folder: str) -> int:
    paths = (PACKAGE / folder).glob("*.py")
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def folders() -> list[str]:
    return sorted({name_of(path.parent) for path in sources(PACKAGE)} - {"."})


@pytest.mark.parametrize("folder", folders())
def test_folder_has_few_files(folder: str) -> None:
    num = len([path for path in (PACKAGE / folder).glob("*.py") if path.name != "__init__.py"])
    assert num <= MAX_FILES


@pytest.mark.parametrize("folder", folders())
def test_folder_keeps_its_line_budget(folder: str) -> None:
    assert folder in BUDGETS, "give a new folder a budget"
    assert lines_of(folder) <= BUDGETS[folder]


def test_core_is_small_enough_to_read_in_a_day() -> None:
    assert sum(map(lines_of, CORE)) <= MAX_CORE_LINES


def test_trunk_does_not_grow() -> None:
    trunk = [p for p in sources(PACKAGE) if not f"{name_of(p)}/".startswith(OUTSIDE_THE_TRUNK)]
    assert len(trunk) <= MAX_TRUNK_FILES
    assert sum(len(p.read_text("utf-8").splitlines()) for p in trunk) <= MAX_TRUNK_LINES


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
    """Nested folders may import each other."""
    assert not circles()


def test_schedulers_core_imports_no_feature() -> None:
    modules = {module_of(path): path for path in sources(PACKAGE)}
    for path in sources(PACKAGE / "scheduler" / "core"):
        found = {name_of(modules[name].parent) for name in imported(path, set(modules))}
        assert found <= ALLOWED_FOLDERS, path.name


def test_schedulers_core_names_no_feature() -> None:
    """Messages for clients and comments may name features."""
    for path in sources(PACKAGE / "scheduler" / "core"):
        found = {name for name in names(path) if words(name) & OF_THE_CORE}
        assert found <= ALLOWED_NAMES, f"{path.name} names {found - ALLOWED_NAMES}"


# Names of requests and of the row table, which use these words in another sense.
ALLOWED_NAMES = {
    "GrammarReady", "GrammarTaken", "grammar",  # of a request that waits until its grammar is ready
    "is_held_back", "keep_s", "pin_s",  # of requests
    "live", "live_blocks",  # of block tables
    "_states_to_keep", "has_held", "held", "holds", "is_held", "keep_states",
}  # fmt: skip


def test_core_has_no_optional_attributes() -> None:
    """An attribute that may be None would be a feature that may be off."""
    optional = {
        node.target.attr
        for path in sources(PACKAGE / "scheduler" / "core")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and re.search(r"\| None$", ast.unparse(node.annotation))
    }
    assert optional == {"new"}, "notes new block names for a listener"
