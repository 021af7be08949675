"""Imports of vllm find quire's names, one by one. Also covers `vllm/names.py`."""

import subprocess
import sys
from importlib import import_module

import pytest

from quire.vllm import finder
from quire.vllm.names import MODULES, REFUSED


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this test alone import vllm."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [finder.VllmFinder(), *sys.meta_path])
    yield  # type: ignore[misc]
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_every_name_of_the_table_is_there(installed: None) -> None:
    for module, names in MODULES.items():
        found = import_module(module)
        for name in names:
            assert getattr(found, name) is not None, f"{module}.{name}"
        assert set(names) <= set(dir(found))


def test_every_parent_of_a_module_is_a_module() -> None:
    for module in MODULES:
        assert module.rpartition(".")[0] in {"", *MODULES}, module
    assert not MODULES.keys() & REFUSED.keys()


def test_a_name_has_one_object_in_all_modules(installed: None) -> None:
    vllm, params = import_module("vllm"), import_module("vllm.sampling_params")
    assert vllm.SamplingParams is params.SamplingParams
    assert vllm.AsyncLLMEngine is import_module("vllm.v1.engine.async_llm").AsyncLLM
    assert vllm.outputs is import_module("vllm.outputs"), "an attribute of its package"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("from vllm import ModelRegistry", "vllm.ModelRegistry is not offered.*docs/extend/models"),
        ("import vllm.assets.image", "vllm.assets is not offered.*open a file of your own"),
        ("import vllm.v1.core", "vllm.v1.core is not offered.*scheduler.md"),
        ("from vllm.config import LoRAConfig", "give enable_lora, max_loras and max_lora_rank"),
        ("from vllm.config import WeightTransferConfig", "call update_weights.*training.md"),
        ("from vllm import nonsense", "vllm.nonsense is not offered.*docs/use/vllm.md"),
    ],
)
def test_what_is_not_offered_has_a_reason(installed: None, statement: str, reason: str) -> None:
    with pytest.raises(ImportError, match=reason) as raised:
        exec(statement, {})
    assert raised.value.name == "vllm"


def test_star_imports_and_attributes(installed: None) -> None:
    names: dict[str, object] = {}
    exec("from vllm.inputs import *", names)
    assert "TokensPrompt" in names
    assert not getattr(import_module("vllm"), "ModelRegistry", None)


def test_installing_twice_changes_nothing_and_another_vllm_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "vllm", sys)
    with pytest.raises(ImportError, match="imported already"):
        finder.install()
    monkeypatch.delitem(sys.modules, "vllm")
    finder.install()
    num = len(sys.meta_path)
    finder.install()
    assert len(sys.meta_path) == num


def test_nothing_loads_these_names_and_they_load_little() -> None:
    code = (
        "import sys, quire.serve.python.llm, quire.cli.main;"
        "assert not [m for m in sys.modules if m.startswith('quire.vllm')];"
        "import quire.vllm.finder as f; f.install(); import vllm, vllm.inputs;"
        "print(sorted(m for m in sys.modules if m.startswith('quire.vllm')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['quire.vllm', 'quire.vllm.finder', 'quire.vllm.names']"


def test_importing_vllm_loads_no_torch() -> None:
    code = (
        "import sys, quire.vllm.finder as f; f.install(); from vllm import SamplingParams;"
        "from vllm.inputs import TokensPrompt; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
