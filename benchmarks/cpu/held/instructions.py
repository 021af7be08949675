"""How each engine is held to AVX2: environment variables, and builds without AVX-512.

llama.cpp chooses its instruction set when it is compiled. quire chooses its kernels when it runs,
and its loops that the compiler vectorises when it is loaded. A build with QUIRE_VARIANTS=avx2 has
neither above AVX2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.cpu.engines import LLAMA, OPENVINO, Engine

GLIBC_FEATURES = ("AVX512F", "AVX512VL", "AVX512BW", "AVX512DQ", "AVX512CD")
NUMPY_FEATURES = (
    "AVX512F", "AVX512CD", "AVX512_SKX", "AVX512_CLX", "AVX512_CNL", "AVX512_ICL", "AVX512_SPR"
)  # fmt: skip
VARIABLES: Mapping[str, str] = {
    "QUIRE_CPU_VARIANT": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",  # OpenVINO, torch
    "ATEN_CPU_CAPABILITY": "avx2",
    "CT2_FORCE_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "NPY_DISABLE_CPU_FEATURES": " ".join(NUMPY_FEATURES),
    "GLIBC_TUNABLES": f"glibc.cpu.hwcaps={','.join('-' + name for name in GLIBC_FEATURES)}",
}
# Its own choice follows the CPU and fails with the limited library. On a CPU of AVX2 it is float32.
OPENVINO_OPTIONS = {"INFERENCE_PRECISION_HINT": "f32"}
LLAMA_SWITCHES = {
    "NATIVE": "OFF", "AVX": "ON", "AVX2": "ON", "FMA": "ON", "F16C": "ON", "BMI2": "ON",
    "AVX512": "OFF", "AVX512_VNNI": "OFF", "AVX512_BF16": "OFF", "AVX_VNNI": "OFF",
}  # fmt: skip
LLAMA_AVX2 = replace(
    LLAMA,
    name="llama-avx2",
    variables=(
        ("CMAKE_ARGS", " ".join(f"-DGGML_{name}={on}" for name, on in LLAMA_SWITCHES.items())),
        ("PIP_NO_CACHE_DIR", "1"),  # pip would take a wheel that was built with other switches
    ),
)


def held(engines: Sequence[Engine]) -> list[Engine]:
    """Return the engines with environments that are built for AVX2, and options that fit."""
    return [_held(engine) for engine in engines]


def _held(engine: Engine) -> Engine:
    if engine.environment == LLAMA:
        return replace(engine, environment=LLAMA_AVX2)
    if engine.environment == OPENVINO:
        return replace(engine, options=engine.options | OPENVINO_OPTIONS)
    return engine
