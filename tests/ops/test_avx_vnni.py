"""Check AVX-VNNI on CPUs without it: the core's own source with an emulated instruction.

On a CPU with AVX-512 VNNI, the instruction in the encoding of AVX-512 is checked as well. Made-up
CPU features check which CPUs run which instruction sets.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.ops.attention import cpu
from quire.ops.weights import formats
from tests.support.kernels.cpp_checks import CSRC, FLAGS, build, checked_variants, tool

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ and x86-64"
)

# Numbers of the variants on a machine with AVX-512 and AVX-VNNI.
LINEAR = {"portable": 0, "avx2": 1, "avx_vnni": 2, "avx512": 3, "avx512_bf16": 4}


def test_emulated_instruction_passes_its_checks(tmp_path: Path) -> None:
    kinds = checked_variants([str(build("vnni", tool("g++", "g++"), tmp_path))])
    assert kinds[0] == "emulated"


def test_cpu_features_select_the_expected_variants(tmp_path: Path) -> None:
    """Among them are Skylake-X, whose AVX-512 lacks VNNI, and AVX10 with 256 bits."""
    assert checked_variants([str(build("variants", tool("g++", "g++"), tmp_path))]) == ["variants"]


def test_attention_without_a_variant_uses_the_next_lower_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attention = {name: number for name, number in LINEAR.items() if name != "avx_vnni"}
    monkeypatch.setattr(formats, "variant_numbers", lambda: LINEAR)
    monkeypatch.setattr(cpu, "variants", lambda: attention)
    assert [cpu.variant_number(name) for name in LINEAR] == [0, 1, 1, 3, 4]
    arm = {"portable": 0, "neon": 1, "neon_dotprod": 2, "neon_i8mm": 3}
    monkeypatch.setattr(formats, "variant_numbers", lambda: arm)
    monkeypatch.setattr(cpu, "variants", lambda: {"portable": 0, "neon": 1})
    assert [cpu.variant_number(name) for name in arm] == [0, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["EMULATED", "EVEX"])
def test_integer_products_have_the_bits_of_exact_sums(form: str, tmp_path: Path) -> None:
    """AVX2 and AVX-512 have the same bits, in all integer formats."""
    flags = (f"-DQUIRE_{form}_AVX_VNNI", "-DQUIRE_COMPILED_VARIANTS=7")
    without = ("avx512", "amx")
    program = build("linear", tool("g++", "g++"), tmp_path, flags=flags, without=without)
    variants = checked_variants([str(program)])
    if "avx2" not in variants:
        pytest.skip("needs a CPU with AVX2")
    if form == "EVEX" and variants[-1] == "avx2":
        pytest.skip("needs a CPU with AVX-512 VNNI")
    assert variants == ["portable", "avx2", "avx_vnni"]


@pytest.mark.slow
def test_clang_compiles_the_kernels(tmp_path: Path) -> None:
    """Builds with clang have portable code only, so only this test compiles the file with it."""
    features = ("-mavx2", "-mfma", "-mf16c", "-mavxvnni", "-DQUIRE_X86_VARIANTS")
    source = CSRC / "linear_avx_vnni.cpp"
    command = [tool("clang++", "clang"), *FLAGS, *features, "-c", str(source)]
    subprocess.run([*command, "-o", str(tmp_path / "kernels.o")], check=True)
