"""Peak memory of loading a 16-bit checkpoint that is quantised layer by layer."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cpu.checkpoints import write_checkpoint
from benchmarks.cpu.workloads import Shape
from quire.ops.host.native import core

SMALL = Shape("small", "qwen3", 256, 2, 4, 2, 64, 512, 2048)
LARGE = Shape("large", "qwen3", 1024, 24, 16, 8, 128, 3072, 32768)
MEASURED = """
import sys, torch
from pathlib import Path
from quire.base.settings.config import ModelConfig
from quire.models.checkpoint.formats import weight_formats
from quire.models.load.loading import LoadOptions, load_model, model_bytes
from quire.spec.model_spec import load_spec

def memory(name):
    text = Path("/proc/self/status").read_text()
    return int(text.split(name + ":")[1].split()[0]) * 1024

options = LoadOptions("auto", formats=weight_formats(ModelConfig(quantization=sys.argv[1])))
for path in map(Path, sys.argv[2:]):
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    model = load_model(path, load_spec(path), torch.bfloat16, torch.device("cpu"), options)
    print(memory("VmHWM") - before, model_bytes(model))
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = [tmp_path_factory.mktemp("checkpoints") / shape.name for shape in (SMALL, LARGE)]
    for shape, path in zip((SMALL, LARGE), paths, strict=True):
        write_checkpoint(shape, path)
    return paths


@pytest.mark.slow  # writes a gigabyte
@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("quantization", "per_weight"), [("int8", 1.1), ("int4", 0.65)])
def test_peak_memory_is_below_1_05_times_the_packed_weights(
    checkpoints: list[Path], quantization: str, per_weight: float
) -> None:
    """A small model is loaded first, so that imported code does not count."""
    command = [sys.executable, "-c", MEASURED, quantization, *map(str, checkpoints)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, packed = map(int, done.stdout.splitlines()[-1].split())
    assert 2e8 < packed < per_weight * (checkpoints[1] / "model.safetensors").stat().st_size / 2
    assert peak < 1.05 * packed, (peak, packed)
