"""Check attention's launches on five compute capabilities: spills, late reads, copies, casts."""

import re
from typing import Any

import pytest
import torch

from quire.ops.kernels.attention.attention_plan import Cut
from quire.ops.kernels.attention.attention_tiles import (
    HOPPER,
    constants,
    machine_with,
    num_warps,
)
from tests.kernels.test_aot import ARRIVAL_ORDER
from tests.support.kernels.aot import compiled

ARCHS = (80, 86, 89, 90, 120)
WIDE_BYTES = 192  # spilled by heads above 128 numbers that are quantised or have a fixed cut
LATENT_BYTES = 24  # by latent attention with 8-bit vectors, and with a fixed cut on sm_120
FEW_BYTES = 64  # by some fixed cuts, and by small quantised heads except on Hopper


def spill_limit(arch: int, name: str) -> int:
    """Return the bytes per thread that a launch may spill: 0 unless every tile size spills."""
    kv_format, size, kind = name.split()[:3]
    is_fixed, is_wide = kind == "fixed", int(size) > 128
    if is_wide and (is_fixed or (kv_format != "auto" and kind == "long")):
        return WIDE_BYTES
    if kind == "merging" and is_wide:
        return FEW_BYTES
    is_small = arch != 90 and kv_format != "auto" and size == "64"
    return FEW_BYTES if is_fixed or is_small else 0


@pytest.mark.slow
@pytest.mark.parametrize("part", ["0/4", "1/4", "2/4", "3/4"])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_launch_has_late_reads_or_unexpected_spills(arch: int, part: str) -> None:
    found = compiled("aot", "spills", str(arch), part)
    assert len(found) >= 12
    for each in found:
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"
        assert each["stack"] <= spill_limit(arch, each["name"]), f"registers are spilled: {each}"
        is_merging = " merging" in each["name"]
        assert bool(each["arrival"]) == is_merging, "only merging launches count arrivals"
        if is_merging:
            assert re.fullmatch(ARRIVAL_ORDER, each["arrival"]), each
        assert each["shared"] <= {80: 163, 90: 227}.get(arch, 99) << 10, f"shared memory: {each}"


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_no_latent_launch_has_late_reads_or_unexpected_spills(arch: int) -> None:
    found = compiled("aot", "latents", str(arch), "0/1")
    assert len(found) >= 24
    for each in found:
        kv_format, _, kind = each["name"].split()[:3]
        is_limited = kv_format != "auto" or (kind == "fixed" and arch == 120)
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"
        assert each["stack"] <= (LATENT_BYTES if is_limited else 0), f"spilled registers: {each}"
        assert each["shared"] <= {80: 163, 90: 227}.get(arch, 99) << 10, f"shared memory: {each}"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["0/4", "1/4", "2/4", "3/4"])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_rotating_launch_has_late_reads_or_spills(arch: int, part: str) -> None:
    """On Hopper, three programs fit the registers and the shared memory of a multiprocessor."""
    found = compiled("aot", "rotating", str(arch), part)
    assert len(found) >= 6
    for each in found:
        assert each["late_reads"] == 0, f"a buffer is loaded again before it is read: {each}"
        assert each["stack"] == 0, f"registers are spilled: {each}"
        is_merging = "merging" in each["name"]
        assert bool(each["arrival"]) == is_merging, "only merging launches count arrivals"
        if is_merging:
            assert re.fullmatch(ARRIVAL_ORDER, each["arrival"]), each
        assert each["shared"] <= {80: 163, 90: 227}.get(arch, 99) << 10, f"shared memory: {each}"
        size, group_size = map(int, each["name"].split()[:2])
        if arch == 90 and HOPPER.for_decoding(size, group_size) != HOPPER:
            assert each["registers"] <= 168 and 3 * (each["shared"] + 1024) <= 228 << 10, each


@pytest.mark.slow
def test_keys_are_copied_in_wide_loads_without_slow_conversions() -> None:
    """Triton copies 8-bit values 8 bytes at a time, since the product reads them by columns."""
    found = {each["kv_format"]: each for each in compiled("aot", "loads")}
    assert set(found["auto"]["copies"]) == {16}
    assert set(found["int8"]["copies"]) == set(found["fp8"]["copies"]) == {8, 16}
    assert [each["slow"] for each in found.values()] == [0, 0, 0]


def warps(machine: Any, size: int = 128, group_size: int = 4, **given: Any) -> tuple[int, int]:
    """Return the rows and warps of long tiles."""
    cut = Cut(long_rows=machine.long_rows, **given).of_group(group_size, None, size)
    return cut.long_rows, num_warps(cut, size, "auto", True, machine)


def test_tile_sizes_depend_on_the_machine() -> None:
    ampere = machine_with(108, has_warp_groups=False, has_space=True)
    consumer = machine_with(82, has_warp_groups=False, has_space=False)
    assert machine_with(132, has_warp_groups=True, has_space=True) == HOPPER
    assert (ampere.num_stages, consumer.num_stages) == (3, 2)
    assert consumer.num_programs == 164
    assert warps(HOPPER) == (128, 8) and warps(HOPPER.with_small_tiles) == (64, 4)
    assert warps(ampere) == warps(consumer) == (64, 8)
    # Heads of 256 numbers keep eight warps, and so does a group that needs more rows.
    assert warps(HOPPER.with_small_tiles, 256) == warps(HOPPER, 256) == (64, 8)
    assert warps(HOPPER.with_small_tiles, 64, 100) == (128, 8)
    assert warps(HOPPER, is_fixed=True) == (64, 4) and warps(ampere, is_fixed=True) == (64, 8)
    assert warps(HOPPER, group_size=5, is_fixed=True) == (64, 8)


def test_fp8_is_multiplied_in_float16_unless_queries_are_float32() -> None:
    cut = Cut().of_group(4, None, 128)
    for dtype, wanted in (
        (torch.float16, "fp16"),
        (torch.bfloat16, "fp16"),
        (torch.float32, "fp32"),
    ):
        assert str(constants(cut, dtype, 8, 128, 16, "fp8")["DOT"]) == wanted
