"""Imports of `from quire import LLM`, and the garbage collector during them.

Covers `src/quire/__init__.py`.
"""

import gc
import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import NoReturn

import pytest

import quire


@pytest.fixture(autouse=True)
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a name be imported once more, whatever other tests have imported."""
    monkeypatch.delitem(sys.modules, "quire.serve.python.llm", raising=False)


def test_a_name_whose_module_is_there_is_not_imported_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "quire.serve.python.llm", SimpleNamespace(LLM=1))
    monkeypatch.setattr(importlib, "import_module", None)
    assert quire.LLM == 1


def test_the_garbage_collector_pauses_while_names_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    was_collecting = list[bool]()

    def import_module(name: str) -> SimpleNamespace:
        was_collecting.append(gc.isenabled())
        return SimpleNamespace(LLM=name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert quire.LLM == "quire.serve.python.llm"
    assert gc.isenabled()
    gc.disable()
    try:
        assert quire.LLM and not gc.isenabled(), "the program's own choice"
    finally:
        gc.enable()
    assert was_collecting == [False, False]


def test_what_was_imported_is_in_the_oldest_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(LLM=[])
    monkeypatch.setattr(importlib, "import_module", lambda name: made)
    gc.unfreeze()
    found = quire.LLM
    assert any(each is found for each in gc.get_objects(generation=2))


def test_what_a_program_has_frozen_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(LLM=name))
    gc.freeze()
    try:
        num_frozen = gc.get_freeze_count()
        assert quire.LLM and gc.get_freeze_count() > num_frozen // 2
    finally:
        gc.unfreeze()


def test_the_collector_goes_on_after_an_import_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> NoReturn:
        assert not gc.isenabled()
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(ImportError, match="llm"):
        _ = quire.LLM
    assert gc.isenabled()


def test_llm_leaves_ranks_to_models_that_have_some() -> None:
    code = "from quire import LLM\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert "quire.engine.start.build" in names
    assert "quire.engine.ranks.launch" not in names
