"""Check AMX on CPUs without it: the core's own source with emulated tile instructions.

On a CPU with AMX, the emulation must equal the instructions bit by bit.
"""

import platform
import shutil
from pathlib import Path

import pytest

from tests.support.kernels.cpp_checks import build, checked_variants, tool

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ and x86-64"
)


def test_emulated_tiles_pass_their_checks(tmp_path: Path) -> None:
    kinds = checked_variants([str(build("tiles", tool("g++", "g++"), tmp_path))])
    assert kinds[0] == "emulated"


@pytest.mark.slow
@pytest.mark.parametrize("check", ["linear", "attention"])
def test_products_with_emulated_tiles_pass_their_checks(check: str, tmp_path: Path) -> None:
    program = build(check, tool("g++", "g++"), tmp_path, flags=("-DQUIRE_EMULATED_AMX",))
    variants = checked_variants([str(program)])
    if "avx512_bf16" not in variants:
        pytest.skip("what is not done in tiles needs a CPU with avx512_bf16")
    assert variants[-1] == "amx"
