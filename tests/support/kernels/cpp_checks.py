"""Builds and runs the C++ checks of tests/csrc, which need no Python."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CSRC = ROOT / "csrc"
CHECKS = ROOT / "tests" / "csrc"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-trapping-math", "-Wno-psabi", "-pthread",
         f"-I{CSRC}", f"-I{CHECKS}"]  # fmt: skip

# Patterns of the core's sources that a check needs.
COMMON = ("parallel.cpp", "variants.cpp")
SOURCES = {
    "states": ("states*.cpp", "attention*.cpp", "row_ops.cpp", *COMMON),
    "variants": ("variants.cpp",),
    "vnni": (),
}


def tool(name: str, package: str) -> str:
    """Its path; skips the test without it."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (Debian and Ubuntu: apt install {package})")
    return path


def build(
    check: str,
    compiler: str,
    folder: Path,
    *link_flags: str,
    flags: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
) -> Path:
    """Build tests/csrc/check_<check>.cpp with the sources that it checks. without: parts of the
    names of sources that are left out."""
    patterns = SOURCES.get(check, (f"{check}*.cpp", *COMMON))
    sources = [path for pattern in patterns for path in sorted(CSRC.glob(pattern))]
    sources = [path for path in sources if not any(part in path.name for part in without)]

    def compiled(source: Path) -> str:
        to = folder / f"{source.stem}.o"
        command = [compiler, *FLAGS, *flags, "-c", str(source), "-o", str(to)]
        subprocess.run(command, check=True)
        return str(to)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, [*sources, CHECKS / f"check_{check}.cpp"]))
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
