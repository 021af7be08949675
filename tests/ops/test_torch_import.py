"""Torch without what only tracing needs: it is there as soon as somebody asks for it."""

import subprocess
import sys

import pytest

LEAN = """
import sys
from quire.ops.torch_import import LEFT_OUT, import_rest, import_torch, tell_own_process
tell_own_process()
import_torch()
import torch
assert LEFT_OUT not in sys.modules and not hasattr(torch, "_meta_registrations")
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ("torch._decomp", "torch._prims"))  # parts of the rest
def test_what_traces_brings_the_rest(name: str) -> None:
    code = f"""
import importlib
module = importlib.import_module({name!r})
assert LEFT_OUT in sys.modules and module.__spec__.origin.endswith("__init__.py")
importlib.import_module("torch._dynamo")
print(module is sys.modules[{name!r}])
"""
    assert run(LEAN + code) == "True\n"


def test_fake_tensors_find_their_operators() -> None:
    code = """
from torch._subclasses.fake_tensor import FakeTensorMode  # it imports torch._dynamo
with FakeTensorMode():
    print(torch.linalg.cholesky(torch.ones(3, 3)).shape[0])
assert LEFT_OUT in sys.modules
"""
    assert run(LEAN + code) == "3\n"


def test_generators_are_made_with_the_rest() -> None:
    code = """
from quire.ops.torch_import import new_generator
print(int(torch.empty(1).normal_(generator=new_generator(3)).isfinite()))
"""
    assert run(LEAN + code) == "1\n"


def test_tensors_without_memory_need_the_rest() -> None:
    code = """
def rows():
    ids = torch.zeros(2, dtype=torch.int64, device="meta")
    return torch.ones(3, 3, device="meta").index_select(0, ids).shape[0]
try:
    rows()
except NotImplementedError:  # an error, never a wrong shape
    import_rest()
    import_rest()
    print(rows())
"""
    assert run(LEAN + code) == "2\n"


def test_torch_that_is_there_stays_as_it_is() -> None:
    code = """
import sys, torch
from quire.ops.torch_import import LEFT_OUT, import_torch, tell_own_process
tell_own_process()
before, finders = sys.modules[LEFT_OUT], list(sys.meta_path)
import_torch()
print(sys.modules[LEFT_OUT] is before and sys.meta_path == finders)
"""
    assert run(code) == "True\n"


def test_a_generated_token_needs_no_tracing() -> None:
    code = """
import sys
from quire.cli.main import main
main(["generate", "Hello", "--max-tokens", "1"])
print([name for name in ("torch._meta_registrations", "torch._decomp") if name in sys.modules])
"""
    assert run(code).endswith("[]\n")
