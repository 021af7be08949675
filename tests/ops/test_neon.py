"""The C++ checks of tests/csrc, which need no Python: here, and on emulated 64-bit ARM CPUs.

The cross-compiler and the emulator are Debian's and Ubuntu's g++-aarch64-linux-gnu and
qemu-user-static.
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-Wno-psabi", "-pthread"]
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"

# Sources of the core that a check needs beside its own.
BESIDE = {"states": ("attention*.cpp", "row_ops.cpp")}

# What is checked, emulated CPUs, and the variants that they run.
EMULATED = {
    ("attention", "cortex-a53"): ["portable", "neon"],
    ("linear", "cortex-a53"): ["portable", "neon"],
    ("states", "cortex-a53"): ["portable", "neon"],
    ("linear", "neoverse-n1"): ["portable", "neon", "neon_dotprod"],
    ("linear", "max"): ["portable", "neon", "neon_dotprod", "neon_i8mm"],
}
CHECKS = sorted({check for check, _ in EMULATED})

pytestmark = pytest.mark.slow


def tool(name: str, package: str) -> str:
    """Its path; skips the test without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian and Ubuntu: apt install {package})")
    return path


def build(check: str, compiler: str, folder: Path, *link_flags: str) -> Path:
    """tests/csrc/check_<check>.cpp with the sources that it is about."""
    patterns = (f"{check}*.cpp", *BESIDE.get(check, ()), "parallel.cpp", "variants.cpp")
    sources = [path for pattern in patterns for path in sorted(CSRC.glob(pattern))]

    def compiled(source: Path) -> str:
        to = folder / f"{source.stem}.o"
        command = [compiler, *FLAGS, f"-I{CSRC}", "-c", str(source), "-o", str(to)]
        subprocess.run(command, check=True)
        return str(to)

    with ThreadPoolExecutor(2) as pool:
        checks = ROOT / "tests" / "csrc" / f"check_{check}.cpp"
        objects = list(pool.map(compiled, [*sources, checks]))
    program = folder / "check"
    subprocess.run([compiler, *link_flags, *objects, "-pthread", "-o", str(program)], check=True)
    return program


def checked_variants(command: list[str]) -> list[str]:
    """The variants that the program ran and found right."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.endswith(", 0 wrong") for line in lines), done.stdout
    return [line.split(":")[0] for line in lines]


@pytest.fixture(scope="module")
def arm_programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    compiler = tool(CROSS_COMPILER, "g++-aarch64-linux-gnu")
    tool(EMULATOR, "qemu-user-static")
    return {c: build(c, compiler, tmp_path_factory.mktemp(c), "-static") for c in CHECKS}


@pytest.mark.parametrize("check", CHECKS)
def test_variants_of_this_machine(check: str, tmp_path: Path) -> None:
    variants = checked_variants([str(build(check, tool("g++", "g++"), tmp_path))])
    assert variants[0] == "portable"
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize(("check", "cpu"), EMULATED)
def test_variants_of_emulated_cpus(arm_programs: dict[str, Path], check: str, cpu: str) -> None:
    command = [tool(EMULATOR, "qemu-user-static"), "-cpu", cpu, str(arm_programs[check])]
    assert checked_variants(command) == EMULATED[check, cpu]
