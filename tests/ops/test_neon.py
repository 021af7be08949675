"""Run the C++ checks of tests/csrc on this machine and on emulated 64-bit ARM CPUs.

The cross-compiler and the emulator are Debian's and Ubuntu's g++-aarch64-linux-gnu and
qemu-user-static.
"""

from pathlib import Path

import pytest

from tests.support.kernels.cpp_checks import build, checked_variants, tool

CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"

# Check and emulated CPU, and the variants that run there.
EMULATED = {
    ("attention", "cortex-a53"): ["portable", "neon"],
    ("linear", "cortex-a53"): ["portable", "neon"],
    ("states", "cortex-a53"): ["portable", "neon"],
    ("linear", "neoverse-n1"): ["portable", "neon", "neon_dotprod"],
    ("linear", "max"): ["portable", "neon", "neon_dotprod", "neon_i8mm"],
}
CHECKS = sorted({check for check, _ in EMULATED})

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arm_programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    compiler = tool(CROSS_COMPILER, "g++-aarch64-linux-gnu")
    tool(EMULATOR, "qemu-user-static")
    return {c: build(c, compiler, tmp_path_factory.mktemp(c), "-static") for c in CHECKS}


@pytest.mark.parametrize("check", CHECKS)
def test_checks_pass_on_this_machine(check: str, tmp_path: Path) -> None:
    variants = checked_variants([str(build(check, tool("g++", "g++"), tmp_path))])
    assert variants[0] == "portable"
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize(("check", "cpu"), EMULATED)
def test_checks_pass_on_emulated_cpus(arm_programs: dict[str, Path], check: str, cpu: str) -> None:
    command = [tool(EMULATOR, "qemu-user-static"), "-cpu", cpu, str(arm_programs[check])]
    assert checked_variants(command) == EMULATED[check, cpu]
