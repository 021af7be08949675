"""Kernel launches, and compilation ahead of them."""

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from quire.ops import kernels
from quire.ops.gpu import GPU, gpu_of
from quire.ops.kernels import norm
from quire.ops.kernels.attention.attention_tiles import machine_of, machine_with
from quire.ops.kernels.launch import (
    INTERPRETED,
    InterpretedKernel,
    Kernel,
    compiling,
    stages_that_fit,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_launch_is_compiled_once_ahead_of_time(tmp_path: Path) -> None:
    """Threads compile without running; later launches compile nothing. No GPU is needed."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.compiled_launches"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, cwd=ROOT, capture_output=True,
        text=True, timeout=120, check=True,
    )  # fmt: skip
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["ahead"] == {"compiled": 4} and found["after"] == {"launched": 16}
    assert found["threads"] == ["compiler"]


def test_every_launched_function_can_be_compiled_ahead_of_time() -> None:
    """A function that is launched as `name[grid](...)` is a Kernel."""
    names = [each.name for each in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    launched = []
    for name in names:
        module = importlib.import_module(name)
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        called = set(re.findall(r"\b(\w+)\[(?:grid\b|\([^\]]*\))\]\(", text))
        launched += [getattr(module, each) for each in called if hasattr(module, each)]
    assert len(launched) > 50
    assert all(isinstance(each, Kernel | InterpretedKernel) for each in launched)


@pytest.mark.skipif(not INTERPRETED, reason="counts calls of the interpreter")
def test_compiling_runs_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(2, 8), torch.ones(8)
    calls, run = [], InterpretedFunction.run
    monkeypatch.setattr(
        InterpretedFunction, "run", lambda *its, **named: (calls.append(1), run(*its, **named))
    )
    with ThreadPoolExecutor(1) as executor, compiling(executor):
        norm.rms_norm(x, weight, 1e-6)
    assert calls == []
    norm.rms_norm(x, weight, 1e-6)
    assert calls == [1]


def test_launches_fit_the_properties_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        major=8, minor=6, multi_processor_count=82, shared_memory_per_block_optin=99 << 10
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    device = torch.device("cuda")
    assert gpu_of(device) == GPU((8, 6), 82, 99 << 10)
    assert machine_of(device) == machine_with(82, has_warp_groups=False, has_space=False)
    assert [stages_that_fit(4, size << 10, device) for size in (20, 33, 40, 100)] == [4, 3, 2, 1]
    assert gpu_of(torch.device("cpu")) is None
