"""All result files have one format, in a folder named after the machine."""

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.result_files import (
    FOLDER,
    columns,
    flat,
    keyed,
    machine_name,
    newest,
    problems,
    read,
    read_all,
    write,
)
from quire.base.errors import ConfigError

ZEN4 = {"cpu": "AMD EPYC (family 25, model 17)", "cores": 2}
FACTS = ZEN4 | {"commit": "abc1234", "date": "2026-11-28T08:00:00+00:00"}
GOOD = {
    "benchmark": "fork", "commit": "abc1234", "date": "2026-11-28", "machine": ZEN4,
    "settings": {"rounds": 3}, "rows": [{"case": "one", "add_ms": 1.5, "runs": [1.5, 1.6]}],
}  # fmt: skip


def test_written_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "fork.json"
    rows = [
        {"case": "one", "ms": {"add": 1.5, "plan": {"median": 2.0}}},
        {"case": "two", "n": None},
    ]
    write(path, "fork", rows, {"aims": {"add": 5}}, lambda: dict(FACTS))
    found = read(path)
    assert found.rows == [
        {"case": "one", "ms.add": 1.5, "ms.plan.median": 2.0}, {"case": "two", "n": None}
    ]  # fmt: skip
    assert found.settings == {"aims.add": 5} and found.machine == ZEN4
    assert (found.commit, found.benchmark) == ("abc1234", "fork")
    assert found.where(case="two") == [{"case": "two", "n": None}]


def test_tables_become_flat_rows() -> None:
    assert keyed("rows", {1: {"us": 2}, 8: {"us": 3}}) == [
        {"rows": 1, "us": 2}, {"rows": 8, "us": 3}
    ]  # fmt: skip
    assert columns([{"s": 1, "n": 2}, {"s": 3, "n": 4}]) == {"s": [1, 3], "n": [2, 4]}
    assert columns([]) == {}
    assert flat({"a": {"b": {"c": 1}}, "d": [1, 2]}) == {"a.b.c": 1, "d": [1, 2]}
    assert flat({"a": math.nan, "b": [math.inf, 1.0]}) == {"a": None, "b": [None, 1.0]}


def test_newest_result_of_several_machines_is_found(tmp_path: Path) -> None:
    for machine, date in (("a", "2026-11-28"), ("b", "2026-11-29"), ("c", "2026-11-27")):
        (tmp_path / machine).mkdir()
        text = json.dumps(GOOD | {"date": date, "settings": {"on": machine}})
        (tmp_path / machine / "fork.json").write_text(text)
    assert newest("fork", tmp_path).settings == {"on": "b"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "exactly the fields"),
        ({"date": "yesterday"}, "date must be ISO 8601, not 'yesterday'"),
        ({"commit": ""}, "commit must be text"),
        ({"machine": {"cpu": "x"}}, "machine must have cpu and cores"),
        ({"settings": {"a": {"b": 1}}}, "settings must be a flat object"),
        ({"rows": []}, "rows must be a list that is not empty"),
        ({"rows": [3]}, "row 0 must be an object, not 3"),
        ({"rows": [{}, {"a": {"b": 1}}]}, "row 1, a: {'b': 1} is no finite number"),
        ({"rows": [{"a": [[1]]}]}, "row 0, a"),
        ({"rows": [{"a": math.inf}]}, "row 0, a: inf"),
    ],
)
def test_malformed_results_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    assert problems(GOOD) == []
    assert any(message in text for text in problems(GOOD | change))
    path = tmp_path / "x.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ConfigError, match=r"x\.json: "):
        read(path)


def test_machine_names_follow_from_their_facts() -> None:
    assert machine_name(ZEN4) == "epyc-zen4-2"
    xeon = {"cpu": "Intel(R) X (family 6, model 207)", "cores": 16, "threads": 4}
    assert machine_name(xeon) == "xeon-amx-16"
    assert machine_name(ZEN4 | {"gpu": "NVIDIA H200"}) == "h200"
    assert machine_name({"cpu": "Neoverse V2", "cores": 8}) == "neoverse-v2-8"


def test_all_files_are_valid_and_in_the_folder_of_their_machine() -> None:
    files = {p.relative_to(FOLDER).as_posix() for p in FOLDER.rglob("*") if p.is_file()}
    found = read_all()
    assert files == found.keys() and files
    for name, result in found.items():
        folder, _, file = name.partition("/")
        assert folder == machine_name(result.machine), name
        assert result.benchmark.rpartition(".")[2] in file, name


# Benchmarks with a program outside of the folder.
OUTSIDE = {"chaos", "mutation", "start"}


def module_names() -> set[str]:
    folder = FOLDER.parent
    names = {path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__main__") for name in names}


def test_scripts_write_the_names_of_their_modules() -> None:
    found = {}
    for path in FOLDER.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if is_call and node.func.id == "write" and len(node.args) > 1:
                name, place = node.args[1], path.relative_to(FOLDER.parent).with_suffix("")
                assert isinstance(name, ast.Constant), path
                found[".".join(place.parts).removesuffix(".__main__")] = name.value
    assert len(found) > 35
    assert {module: name for module, name in found.items() if module != name} == {}


def test_files_name_existing_modules() -> None:
    assert {result.benchmark for result in read_all().values()} <= module_names() | OUTSIDE
