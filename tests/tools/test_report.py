"""The context that reports write next to the numbers."""

import json
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.tools.report import plain_facts, write_report


def test_report_without_a_path_writes_nothing(tmp_path: Path) -> None:
    write_report(None, {})
    assert list(tmp_path.iterdir()) == []


def test_report_has_results_and_facts_of_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_report(path, {"a": 1}, plain_facts)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["a"] == 1
    assert {"cpu", "cores", "python", "date", "commit"} == written["machine"].keys()


def test_unwritable_report_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written to .*report.json"):
        write_report(tmp_path / "file" / "report.json", {}, plain_facts)
