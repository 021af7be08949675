"""All kernels of production compile for Hopper: no spills, within shared memory, with wgmma.

`make test` compiles a few kernels to the end, and lowers each of the others to Triton's IR.
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
MOST_SHARED = 227 * 1024  # bytes of a thread block on sm_90
ROOT = "quire.ops.kernels."
WITHOUT_KERNELS = {"launch", "attention.attention_tiles", "products.tiles"}
NAMES = [
    module.name.removeprefix(ROOT)
    for module in pkgutil.walk_packages(quire.ops.kernels.__path__, ROOT)
    if not module.ispkg and module.name.removeprefix(ROOT) not in WITHOUT_KERNELS
]
# Products fused with sums where compilers may not choose to: those that the merge asks for, two
# rows of a thread's tile in attention, and one of each part that is loaded together.
FUSED = {"attention.attention": 2, "attention.attention_merge": 8, "attention.latent": 2}
QUANTISED = ["fp8_matmul", *(name for name in NAMES if name.startswith("quantised"))]
OTHERS = [name for name in NAMES if name not in FUSED and name not in QUANTISED]
# Some kernels of each kind that compile in under a second.
FEW = ["attention.attention_plan", "matmul", "norm", "quantised_rows", "row_deltas"]
# A process takes seconds to start. Attention takes as long to compile as all others.
GROUPS = {"attention": list(FUSED), "quantised": QUANTISED, "others": OTHERS}


def test_few_compile_for_hopper_and_all_are_lowered() -> None:
    others = [name for name in NAMES if name not in FEW]
    found = compiled("aot", "6", *FEW, "--lower", *others)
    lowered = [each for each in found if "ir" in each]
    assert {each["module"] for each in lowered} == set(others), "a module lists nothing"
    assert all("tt.func public @" in each["ir"] for each in lowered)
    check([each for each in found if "ir" not in each], FEW)


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_each_launch_compiles_for_hopper(group: str) -> None:
    """Every launch that a module lists, and its machine code."""
    check(compiled("aot", "1", *GROUPS[group]), GROUPS[group])


def check(found: list[dict[str, Any]], names: Sequence[str]) -> None:
    """Check what the compiler made of the launches of these modules."""
    assert {each["module"] for each in found} == set(names), "a module lists nothing"
    ordered = {each["module"] for each in found if each["fused"] is not None}
    assert ordered == FUSED.keys() & set(names)
    for each in found:
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["shared"] <= MOST_SHARED, f"too much shared memory: {each}"
        assert each["has_wgmma"] or not each["needs_wgmma"], f"no Hopper products: {each}"
        # Scratch memory has two more; the launcher in C++ counts on it.
        assert each["parameters"] == each["arguments"] + 2, f"arguments: {each}"
        has_mail = each["constants"].get("MAIL_WORDS", "0") != "0"
        assert each["system_releases"] == has_mail, f"tokens may come after their flag: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded anew before it is read: {each}"
        assert each["fused"] in (None, FUSED.get(each["module"])), f"what is fused: {each}"


# Cheap modules of each kind, compiled for sm_120.
CHEAP = [
    "attention.attention_plan", "attention.states", "embedding", "moe_sort", "norm",
    "quantised_rows", "rotary_rows", "sampling.mask", "sampling.verify",
]  # fmt: skip


def test_some_of_each_kind_compile_for_a_consumer_gpu() -> None:
    found = compiled("aot", "99", *CHEAP, "--capability", "120")
    assert {each["module"] for each in found} == set(CHEAP)
    for each in found:
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"


# Products, alone and fused; smaller cards have fewer registers and less shared memory.
@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "89", "120"])
def test_products_compile_for_other_gpus(capability: str) -> None:
    names = "few_rows", "gate", "products.adapters", "products.stream_k"
    for each in compiled("aot", "1", *names, "--capability", capability):
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"


# A kernel that is launched before its predecessor has ended waits before it stores, and before it
# loads what an earlier kernel wrote. In the machine code the wait is ACQBULK.
WAITING = {"few_rows": r"L{%d}WP[LS]+", "norm": r"L+WP[LS]+", "products.stream_k": r"WP[LS]+"}
WAITING |= {
    f"attention.{name}": r"WP[LS]+"
    for name in ("attention", "attention_merge", "rotary_attention", "rotary_write")
}


@pytest.mark.parametrize(
    ("step", "capability"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in ((14, "90"), (1, "90"), (1, "120"))],
)
def test_kernels_that_overlap_wait(step: int, capability: str) -> None:
    """Once, before all but the loads of the weight."""
    arguments = "--list", "OVERLAPPING", "--capability", capability
    found = compiled("aot", str(step), *WAITING, *arguments)
    assert {each["module"] for each in found} == set(WAITING), "every kernel that may overlap"
    for each in found:
        order = WAITING[each["module"]]
        if each["module"] == "few_rows":
            order %= loads_of_weight(each["constants"])
        assert re.fullmatch(order, each["memory"]), each
        assert each["stack"] == 0, f"registers are spilled: {each}"


# In the machine code of a program that arrives: its stores; then a barrier, one fence, one atomic
# addition, the end of the nearest cache's lines, a barrier; then the reset, and loads of all parts.
ARRIVING = ["attention.attention", "attention.rotary_attention", "products.stream_k"]
ARRIVAL_ORDER = r"[LSB]*S[LB]*BMACBSL[LB]*S[LSB]*"


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "86", "89", "90", "120"])
def test_the_last_program_reads_after_all_have_stored(capability: str) -> None:
    """Without spills, late reads or a second fence (test_attention_tiles.py: all launches)."""
    found = compiled("aot", "1", *ARRIVING, "--list", "ARRIVING", "--capability", capability)
    assert {each["module"] for each in found} == set(ARRIVING)
    for each in found:
        assert re.fullmatch(ARRIVAL_ORDER, each["arrival"]), each
        assert each["stack"] == 0, f"registers are spilled: {each}"
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"


def test_no_other_kernel_counts_arrivals() -> None:
    """Each caller lists its launches."""
    callers = {name for name in NAMES if "arrives_last(" in source_of(name)}
    assert callers == {"attention.attention_merge", "products.stream_k"}
    callers = {name for name in NAMES if "merge_last(" in source_of(name)}
    assert {*callers, "products.stream_k"} == {*ARRIVING, "attention.attention_merge"}


# Kernels that AMD's gfx942 does not take, by module; docs/inside/gpu-checks.md names the modules.
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
def test_which_kernels_compile_for_amd(group: str) -> None:
    found = compiled("aot", "amd", *GROUPS[group])
    known = {f"{name}.{kernel}" for name in GROUPS[group] for kernel in NOT_FOR_AMD.get(name, ())}
    assert set(found) == known


def test_docs_name_the_modules_that_do_not_compile_for_amd() -> None:
    text = " ".join(CHECKS_PAGE.read_text("utf-8").split())
    names = re.search(r"gfx942, all modules compile except ([^.]*)\.", text)
    assert names is not None
    assert set(re.findall(r"`(\w+)`", names[1])) == {name.split(".")[-1] for name in NOT_FOR_AMD}


def loads_of_weight(constants: dict[str, str]) -> int:
    """Of 16 bytes, by each of 128 threads."""
    inputs, outputs, at_once = (int(constants[k]) for k in ("INPUTS", "BLOCK_N", "BLOCK_K"))
    parts = 1 if constants["GATE"] == "-1" else 2
    return -(-inputs // at_once) * parts * outputs * at_once * 2 // (128 * 16)


def source_of(name: str) -> str:
    return inspect.getsource(importlib.import_module(ROOT + name))


def test_no_other_kernel_overlaps() -> None:
    """The launch option is set by one function, whose callers list their launches."""
    callers = {name for name in NAMES if "pdl_option(" in source_of(name)}
    assert callers == set(WAITING)
    assert all(hasattr(importlib.import_module(ROOT + name), "OVERLAPPING") for name in callers)
