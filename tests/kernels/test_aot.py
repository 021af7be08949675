"""All kernels of production compile for Hopper: no spills, within shared memory, with wgmma."""

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Sequence

import pytest

import quire.ops.kernels

MOST_SHARED = 227 * 1024  # bytes of a thread block on sm_90
ROOT = "quire.ops.kernels."
NAMES = [
    module.name.removeprefix(ROOT)
    for module in pkgutil.walk_packages(quire.ops.kernels.__path__, ROOT)
    if not module.ispkg and module.name != f"{ROOT}launch"
]
# Products fused with sums where compilers may not choose to: those that the merge asks for, two
# rows of a thread's tile in attention, and one of each part that is loaded together.
FUSED = {"attention.attention": 2, "attention.attention_merge": 8}
QUANTISED = ["fp8_matmul", *(name for name in NAMES if name.startswith("quantised"))]
OTHERS = [name for name in NAMES if name not in FUSED and name not in QUANTISED]
# A process takes seconds to start. Attention takes as long to compile as all others.
GROUPS = {"attention": list(FUSED), "quantised": QUANTISED, "others": OTHERS}


@pytest.mark.parametrize(
    ("names", "step"),
    [
        pytest.param(NAMES, 6, id="some"),
        *(pytest.param(names, 1, id=k, marks=pytest.mark.slow) for k, names in GROUPS.items()),
    ],
)
def test_it_compiles_for_hopper(names: Sequence[str], step: int) -> None:
    """Each kernel, and all ways to launch it where there is time."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.aot", str(step), *names],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert {each["module"] for each in found} == set(names), "a module lists nothing"
    ordered = {each["module"] for each in found if each["fused"] is not None}
    assert ordered == FUSED.keys() & set(names)
    for each in found:
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["shared"] <= MOST_SHARED, f"too much shared memory: {each}"
        assert each["has_wgmma"] or not each["needs_wgmma"], f"no Hopper products: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded anew before it is read: {each}"
        assert each["fused"] in (None, FUSED.get(each["module"])), f"what is fused: {each}"
