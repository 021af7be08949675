"""Check a warm-up's launches on five compute capabilities: spills, late reads, shared memory.

Warm-ups of models of each kind list their launches. A few kernels that no warm-up here launches are
listed by their modules. Variants of attention are in test_attention_tiles.py, and products behind a
switch in test_aot.py.
"""

import importlib
from typing import Any, NamedTuple

import pytest

from quire.ops.kernels.launch import InterpretedKernel, Kernel
from tests.kernels.test_aot import NAMES, ROOT
from tests.support.kernels.aot import compiled
from tests.support.kernels.warm_launches import GPUS, MODELS

# Kernels that no warm-up here launches: compiled elsewhere, or from the CONFIGS of their modules.
ELSEWHERE = {
    "attention.rotary_attention._rotary_attention_kernel",
    "products.stream_k._stream_k_kernel",
}
UNLISTED = {
    "embedding._features_kernel",
    "sampling.philox._uniform_at_kernel",
    "sampling.philox._uniform_kernel",
    "sampling.sampling._settle_part",
    "sampling.sampling_edits._copy",
    "sampling.sampling_edits._edit",
}


class Spilled(NamedTuple):
    """Launches with these constants, and the bytes of registers that a thread may spill."""

    kernel: str
    constants: dict[str, str]
    num_bytes: int
    archs: tuple[int, ...] = tuple(GPUS)


# No other launch spills. docs/inside/gpu-checks.md lists these, too.
SPILLED = (
    Spilled("attention.attention._attention_kernel", {"CHUNK": "1024"}, 64),  # fixed cuts
    Spilled("attention.attention._attention_kernel", {"HEAD_DIM": "256"}, 8, (86, 89)),
    Spilled("attention.delta_chunks._scan_kernel", {"D": "128", "E": "128"}, 16, (120,)),
    Spilled("attention.delta_chunks._scan_kernel", {"D": "128", "E": "128"}, 24, (86, 89)),
    Spilled("few_rows._few_rows_kernel", {"ROWS": "2", "INPUTS": "9216"}, 8, (86, 89)),
    Spilled("matmul._matmul_kernel", {"BLOCK_N": "64", "BLOCK_K": "128"}, 16, (80, 86, 89)),
    # 512 threads with 128 registers each; with 256 threads a row would take longer.
    Spilled("sampling.sampling_filtered.settle_filtered", {"CHUNKS": "16"}, 16),
)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("arch", GPUS)
def test_no_launch_of_a_warm_up_has_late_reads_or_unexpected_spills(arch: int, model: str) -> None:
    check(compiled("warm_launches", "compile", str(arch), model)["found"], arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", GPUS)
def test_no_other_launch_has_late_reads_or_unexpected_spills(arch: int) -> None:
    modules = sorted({name.rpartition(".")[0] for name in UNLISTED})
    check(compiled("warm_launches", "unlisted", str(arch), *modules)["found"], arch)


def check(found: list[dict[str, Any]], arch: int) -> None:
    assert found
    for each in found:
        assert each["stack"] <= spill_limit(each, arch), f"registers are spilled: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"
        assert each["shared"] <= GPUS[arch].shared_bytes, f"too much shared memory: {each}"


def spill_limit(launch: dict[str, Any], arch: int) -> int:
    own = [each for each in SPILLED if each.kernel == launch["kernel"] and arch in each.archs]
    fitting = [each for each in own if each.constants.items() <= launch["constants"].items()]
    return max((each.num_bytes for each in fitting), default=0)


@pytest.mark.slow
def test_every_kernel_is_launched_by_a_warm_up_or_listed_here() -> None:
    found = compiled("warm_launches", "list", *MODELS)["found"]
    assert kernels() - {name for names in found.values() for name in names} == UNLISTED | ELSEWHERE


def kernels() -> set[str]:
    """Return the names of all functions that the host launches."""
    return {
        f"{name}.{each.__name__}"
        for name in NAMES
        for each in vars(importlib.import_module(ROOT + name)).values()
        if isinstance(each, Kernel | InterpretedKernel) and each.fn.__module__ == ROOT + name
    }
