"""The helpers of the tests: in one folder tree, few files per folder, and one table of all."""

import re
from collections import defaultdict
from itertools import combinations, product

from tests.structure.test_folders import MAX_FILES
from tests.structure.test_house import ROOT, sources
from tests.structure.test_mirror import TESTS
from tests.support.cases import in_turn, pairwise

SUPPORT = TESTS / "support"
# Commands that tests/README.md lists, or their packages; structure/ has helpers of its own.
COMMANDS = {
    "changed.py",
    "clients/",
    "golden/make.py",
    "models/image_matrix.py",
    "models/matrix.py",
    "models/type_survey.py",
    "mutation/",
    "render/golden/make.py",
    "serve/chaos.py",
    "serve/endpoints_page.py",
    "serve/fields_page.py",
    "serve/vllm_cases/table.py",
    "structure/",
    "vllm/table.py",
}
ROW = re.compile(r"^\| `(support/\S+\.py)` \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
IMPORT = re.compile(r"(tests\.support[\w.]*)(?: import (\w+))?")


def helpers() -> list[str]:
    paths = [path for path in sources(SUPPORT) if path.name != "__init__.py"]
    return [path.relative_to(TESTS).as_posix() for path in paths]


def rows() -> list[tuple[str, set[str]]]:
    """Return the rows of the table: the helper, and the folders that use it."""
    found = ROW.findall((TESTS / "README.md").read_text("utf-8"))
    return [(name, set(users.strip().split(", "))) for name, users in found]


def users() -> dict[str, set[str]]:
    """Return the folders of tests that name each helper, by the helper."""
    found = defaultdict[str, set[str]](set)
    for path in sources(TESTS, ROOT / "benchmarks"):
        folder = path.relative_to(TESTS if TESTS in path.parents else ROOT).parts[0]
        for module, name in IMPORT.findall(path.read_text("utf-8")):
            for dotted in (module, f"{module}.{name}"):
                helper = ROOT.joinpath(*dotted.split(".")).with_suffix(".py")
                if helper != path:
                    found[f"{'/'.join(dotted.split('.')[1:])}.py"].add(folder)
    return found


def test_table_has_one_row_for_each_helper() -> None:
    assert sorted(name for name, _ in rows()) == sorted(helpers())


def test_each_helper_is_used_by_the_folders_in_its_row() -> None:
    actual = users()
    assert not {name: named - actual[name] for name, named in rows() if named - actual[name]}


def test_other_folders_contain_only_tests_and_commands() -> None:
    others = [
        path.relative_to(TESTS).as_posix()
        for path in sources(TESTS)
        if SUPPORT not in path.parents
        and not path.name.startswith("test_")
        and path.name not in ("__init__.py", "conftest.py")
    ]
    assert not [name for name in others if not name.startswith(tuple(COMMANDS))], (
        "move helpers to tests/support"
    )
    assert all((TESTS / command).exists() for command in COMMANDS)


def test_folder_of_helpers_has_few_files() -> None:
    folders = {SUPPORT, *(path.parent for path in sources(SUPPORT))}
    crowded = {f.name for f in folders if len([*f.glob("*.py")]) - 1 > MAX_FILES}
    assert not crowded


def test_each_pair_of_values_has_a_quick_case() -> None:
    factors = ["abc", "ABCD", "12"]
    cases = pairwise(*factors)
    assert [case.values for case in cases] == list(product(*factors))
    quick = [case.values for case in cases if not case.marks]
    found = {pair for values in quick for pair in combinations(values, 2)}
    assert found == {p for two in combinations(factors, 2) for p in product(*two)}
    assert len(quick) < len(cases) / 1.5


def test_in_turn_uses_each_value_in_a_quick_case() -> None:
    factors = (1, 2, 3), "ab"
    cases = in_turn(*factors)
    assert [case.values for case in cases] == list(product(*factors))
    assert [case.values for case in cases if not case.marks] == [(1, "a"), (2, "b"), (3, "a")]
