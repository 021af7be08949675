"""Torch without its tracing modules: they are imported on first use."""

import subprocess
import sys

import pytest
import torch

from quire.ops.host import torch_import
from quire.ops.host.torch_import import DEFERRED_MODULE, import_torch

# Each case is a fork of one process that has generated a token: torch is imported once for all.
PROGRAM = """
import importlib, os, sys, traceback
from quire.cli.main import main
from quire.ops.host.torch_import import DEFERRED_MODULE, import_rest, import_torch, new_generator

def decomp_brings_the_rest(name="torch._decomp"):
    module = importlib.import_module(name)
    assert DEFERRED_MODULE in sys.modules and module.__spec__.origin.endswith("__init__.py")
    importlib.import_module("torch._refs")
    assert module is sys.modules[name]

def prims_bring_the_rest():
    decomp_brings_the_rest("torch._prims")

def fake_tensors_find_their_operators():
    assert "torch._prims" not in sys.modules
    from torch._subclasses.fake_tensor import FakeTensorMode  # it imports torch._dynamo
    with FakeTensorMode():
        assert torch.linalg.cholesky(torch.ones(3, 3)).shape[0] == 3
    assert DEFERRED_MODULE in sys.modules

def generators_are_made_with_the_rest():
    assert torch.empty(1).normal_(generator=new_generator(3)).isfinite()

def tensors_without_memory_need_the_rest():
    def rows():
        ids = torch.zeros(2, dtype=torch.int64, device="meta")
        return torch.ones(3, 3, device="meta").index_select(0, ids).shape[0]
    try:
        rows()
    except NotImplementedError:  # an error, never a wrong shape
        import_rest()
        import_rest()
        assert rows() == 2
    else:
        raise AssertionError("it has the rest already")

names, sys.argv[1:] = sys.argv[1:], []

def passes(case):
    if (child := os.fork()) == 0:
        try:
            case()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0

main(["generate", "Hello", "--max-tokens", "1"])
import_torch()  # a start after another needs no torch
import torch
assert not [name for name in (DEFERRED_MODULE, "torch._decomp") if name in sys.modules]
assert not hasattr(torch, "_meta_registrations")
print("failed:", [name for name in names if not passes(globals()[name])])
"""


CASES = [
    "decomp_brings_the_rest",
    "generators_are_made_with_the_rest",
    "tensors_without_memory_need_the_rest",
]
# These import much of torch, and repeat the first case's assertions for other modules.
LONG_CASES = ["prims_bring_the_rest", "fake_tensors_find_their_operators"]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, LONG_CASES], ids=["few", "others"])
def test_generation_imports_no_tracing_modules_until_they_are_used(
    cases: list[str],
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *cases],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("failed: []\n"), done.stdout + done.stderr


def test_torch_that_is_already_imported_stays_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_import, "_runs_only_quire", [True])
    rest, finders = sys.modules.get(DEFERRED_MODULE), list(sys.meta_path)
    import_torch()
    assert sys.modules.get(DEFERRED_MODULE) is rest and sys.meta_path == finders
    assert sys.modules["torch"] is torch
