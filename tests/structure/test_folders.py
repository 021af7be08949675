"""Folders of the engine: few files in each, and no two import each other but parent and child."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.structure.test_house import PACKAGE, sources
from tests.structure.test_owners import imported, module_of

ENGINE = PACKAGE / "engine"
MAX_FILES = 15  # of a folder, without its __init__.py


def modules_in(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.py") if path.name != "__init__.py"]


def folders() -> list[Path]:
    return sorted({path.parent for path in sources(ENGINE)} - {ENGINE})


def test_a_folder_holds_few_files() -> None:
    found = {folder.name: len(modules_in(folder)) for folder in folders()}
    assert {name: num for name, num in found.items() if num > MAX_FILES} == {}
    assert not modules_in(ENGINE), "each file of the engine is in one of its folders"


def test_no_circle_of_folders() -> None:
    """A folder and those in it are one here."""
    modules = {module_of(path): path for path in sources(ENGINE)}
    graph: dict[str, set[str]] = {}
    for path in modules.values():
        own = path.relative_to(ENGINE).parts[0]
        found = {modules[name] for name in imported(path, set(modules))}
        others = {each.relative_to(ENGINE).parts[0] for each in found if each.parent != ENGINE}
        graph.setdefault(own, set()).update(others - {own})
    del graph["__init__.py"]
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(f"these import each other: {error.args[1]}") from error
    assert order.index("loop") < order.index("attachments") < order.index("start")
