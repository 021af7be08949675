"""What production launches compiles for Hopper: no spills, within the shared memory, with wgmma."""

import json
import os
import pkgutil
import subprocess
import sys

import pytest

import quire.ops.kernels

MOST_SHARED = 227 * 1024  # bytes of a thread block on sm_90
NAMES = [
    module.name for module in pkgutil.iter_modules(quire.ops.kernels.__path__)
    if module.name != "launch"
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_for_hopper(name: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.aot", name],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert found, "the module lists nothing that is launched"
    for each in found:
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["shared"] <= MOST_SHARED, f"too much shared memory: {each}"
        assert each["has_wgmma"] or not each["needs_wgmma"], f"no Hopper products: {each}"
