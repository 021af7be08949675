"""Every production kernel compiles for Hopper without spills, with wgmma, in shared memory.

`make test` compiles a few kernels fully and lowers the others to Triton's IR.
"""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import quire.ops.kernels
from tests.support.kernels.aot import compiled

CHECKS_PAGE = Path(__file__).parents[2] / "docs" / "inside" / "gpu-checks.md"
MAX_SHARED_BYTES = 227 * 1024  # per thread block on sm_90
ROOT = "quire.ops.kernels."
WITHOUT_KERNELS = {"launch", "attention.attention_tiles", "products.tiles"}
NAMES = [
    module.name.removeprefix(ROOT)
    for module in pkgutil.walk_packages(quire.ops.kernels.__path__, ROOT)
    if not module.ispkg and module.name.removeprefix(ROOT) not in WITHOUT_KERNELS
]
# Fused multiply-adds where the compiler may not fuse by itself. The merge requests some: two for
# the rows of a thread's tile in attention, and one for each part that is loaded together.
FUSED = {"attention.attention": 2, "attention.attention_merge": 8, "attention.latent": 2}
QUANTISED = ["fp8_matmul", *(name for name in NAMES if name.startswith("quantised"))]
OTHERS = [name for name in NAMES if name not in FUSED and name not in QUANTISED]
# Some kernels of each kind that compile in under a second.
FEW = ["attention.attention_plan", "matmul", "norm", "quantised_rows", "row_deltas"]
# A process takes seconds to start. Attention takes as long to compile as all other kernels.
GROUPS = {"attention": list(FUSED), "quantised": QUANTISED, "others": OTHERS}


def test_few_kernels_compile_for_hopper_and_the_others_lower() -> None:
    others = [name for name in NAMES if name not in FEW]
    found = compiled("aot", "6", *FEW, "--lower", *others)
    lowered = [each for each in found if "ir" in each]
    assert {each["module"] for each in lowered} == set(others), "a module lists no launches"
    assert all("tt.func public @" in each["ir"] for each in lowered)
    check([each for each in found if "ir" not in each], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_each_launch_compiles_for_hopper(group: str) -> None:
    """Check the machine code of every launch that a module lists."""
    check(compiled("aot", "1", *GROUPS[group]), GROUPS[group])


def check(found: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Check the compiler's output for the launches of these modules."""
    assert {each["module"] for each in found} == set(names), "a module lists no launches"
    ordered = {each["module"] for each in found if each["fused"] is not None}
    assert ordered == FUSED.keys() & set(names)
    for each in found:
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["shared"] <= MAX_SHARED_BYTES, f"too much shared memory: {each}"
        assert each["has_wgmma"] or not each["needs_wgmma"], f"no Hopper products: {each}"
        # Two more parameters are for scratch memory; the C++ launcher relies on them.
        assert each["parameters"] == each["arguments"] + 2, f"unexpected parameters: {each}"
        has_mail = each["constants"].get("MAIL_WORDS", "0") != "0"
        assert each["system_releases"] == has_mail, f"tokens may land after their flag: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"
        assert each["fused"] in (None, FUSED.get(each["module"])), f"fused products: {each}"


# Cheap modules of each kind, compiled for sm_120.
CHEAP = [
    "attention.attention_plan", "attention.states", "embedding", "moe_sort", "norm",
    "quantised_rows", "rotary_rows", "sampling.mask", "sampling.verify",
]  # fmt: skip


def test_cheap_modules_of_each_kind_compile_for_a_consumer_gpu() -> None:
    found = compiled("aot", "99", *CHEAP, "--capability", "120")
    assert {each["module"] for each in found} == set(CHEAP)
    for each in found:
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"


# Matrix products, alone and fused; smaller GPUs have fewer registers and less shared memory.
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "89", "120"])
def test_products_compile_for_other_gpus(capability: str) -> None:
    names = "few_rows", "gate", "products.adapters", "products.stream_k"
    for each in compiled("aot", "1", *names, "--capability", capability):
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"


# A kernel that overlaps its predecessor waits before it stores, and before it loads data that an
# earlier kernel wrote. In the machine code the wait is ACQBULK.
WAITING = {"few_rows": r"L{%d}WP[LS]+", "norm": r"L+WP[LS]+", "products.stream_k": r"WP[LS]+"}
WAITING |= {
    f"attention.{name}": r"WP[LS]+"
    for name in ("attention", "attention_merge", "rotary_attention", "rotary_write")
}


@pytest.mark.parametrize(
    ("step", "capability"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in ((14, "90"), (1, "90"), (1, "120"))],
)
def test_overlapping_kernels_wait_once(step: int, capability: str) -> None:
    """Only loads of the weight come before the wait."""
    arguments = "--list", "OVERLAPPING", "--capability", capability
    found = compiled("aot", str(step), *WAITING, *arguments)
    assert {each["module"] for each in found} == set(WAITING), "a module lists no launches"
    for each in found:
        order = WAITING[each["module"]]
        if each["module"] == "few_rows":
            order %= loads_of_weight(each["constants"])
        assert re.fullmatch(order, each["memory"]), each
        assert each["stack"] == 0, f"registers are spilled: {each}"


# Machine code of a program that counts its arrival: its stores; a barrier, one fence, one atomic
# addition, an invalidation of the L1 cache, a barrier; the counter's reset, and loads of all parts.
ARRIVING = ["attention.attention", "attention.rotary_attention", "products.stream_k"]
ARRIVAL_ORDER = r"[LSB]*S[LB]*BMACBSL[LB]*S[LSB]*"


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "89", "90", "120"])
def test_last_program_reads_parts_after_all_stores(capability: str) -> None:
    """Also check spills and late reads. test_attention_tiles.py covers all launches."""
    found = compiled("aot", "1", *ARRIVING, "--list", "ARRIVING", "--capability", capability)
    assert {each["module"] for each in found} == set(ARRIVING)
    for each in found:
        assert re.fullmatch(ARRIVAL_ORDER, each["arrival"]), each
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"


def test_only_listed_kernels_count_arrivals() -> None:
    callers = {name for name in NAMES if "arrives_last(" in source_of(name)}
    assert callers == {"attention.attention_merge", "products.stream_k"}
    callers = {name for name in NAMES if "merge_last(" in source_of(name)}
    assert {*callers, "products.stream_k"} == {*ARRIVING, "attention.attention_merge"}


# Kernels that fail to compile for AMD's gfx942; docs/inside/gpu-checks.md names the modules.
NOT_FOR_AMD = {
    "attention.delta_chunks": {"_solve_kernel"},
    "matmul": {"_matmul_kernel"},
    "quantised": {"_matmul_kernel"},
    "quantised_moe": {"_grouped_kernel"},
    "sampling.sampling_filtered": {"settle_filtered"},
    "sampling.sampling_scan": {"scan"},
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_only_listed_kernels_do_not_compile_for_amd(group: str) -> None:
    found = compiled("aot", "amd", *GROUPS[group])
    known = {f"{name}.{kernel}" for name in GROUPS[group] for kernel in NOT_FOR_AMD.get(name, ())}
    assert set(found) == known


def test_docs_name_the_modules_that_do_not_compile_for_amd() -> None:
    text = " ".join(CHECKS_PAGE.read_text("utf-8").split())
    names = re.search(r"gfx942, all modules compile except ([^.]*)\.", text)
    assert names is not None
    assert set(re.findall(r"`(\w+)`", names[1])) == {name.split(".")[-1] for name in NOT_FOR_AMD}


def loads_of_weight(constants: dict[str, str]) -> int:
    """Return the number of 16-byte loads of the weight by each of 128 threads."""
    inputs, outputs, at_once = (int(constants[k]) for k in ("INPUTS", "BLOCK_N", "BLOCK_K"))
    parts = 1 if constants["GATE"] == "-1" else 2
    return -(-inputs // at_once) * parts * outputs * at_once * 2 // (128 * 16)


def source_of(name: str) -> str:
    return inspect.getsource(importlib.import_module(ROOT + name))


def test_only_listed_kernels_overlap() -> None:
    """One function sets the launch option; each caller lists its launches in OVERLAPPING."""
    callers = {name for name in NAMES if "pdl_option(" in source_of(name)}
    assert callers == set(WAITING)
    assert all(hasattr(importlib.import_module(ROOT + name), "OVERLAPPING") for name in callers)
