"""Weights packed from rows of a file have the same bytes as those packed from memory."""

import os
import sys
from io import FileIO
from pathlib import Path

import pytest
import torch

from quire.base.errors import ConfigError, ModelError
from quire.ops.host.native import core
from quire.ops.weights.formats import VARIANT, Quantization, variants
from quire.ops.weights.mapped_tensors import FilePosition, MappedTensors
from quire.ops.weights.pack import pack_parts
from tests.ops.test_linear import random

if core() is None:
    pytest.skip("the C++ core is not built", allow_module_level=True)

FORMATS = [None, Quantization("int8", 32), Quantization("int4", 32)]


def stored(values: torch.Tensor, path: Path, mapped: MappedTensors, before: int = 13) -> FileIO:
    """Write values to a file after some other bytes, and add them as mapped from there."""
    numbers = values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    path.write_bytes(bytes(before) + numbers + b"more")
    file = FileIO(path)
    mapped.add(values, FilePosition(file, before))
    return file


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("quantization", FORMATS, ids=["plain", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 8), (64, 64), (130, 131), (257, 96), (2048, 33)])
def test_packing_from_a_file_gives_the_bytes_of_packing_from_memory(
    shape: tuple[int, int],
    dtype: torch.dtype,
    quantization: Quantization | None,
    variant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIANT, variant)
    weight, mapped = random(*shape).to(dtype), MappedTensors()
    wanted = pack_parts([weight], dtype, quantization)
    with stored(weight, tmp_path / "weight", mapped):
        weight.zero_()  # memory is not read
        got = pack_parts([weight], dtype, quantization, mapped=mapped)
    assert got.variant == wanted.variant == variant
    assert torch.equal(got.data, wanted.data)


@pytest.mark.parametrize("first", [64, 65])
def test_parts_may_be_in_several_files_and_in_memory(first: int, tmp_path: Path) -> None:
    """Some rows of one file, all of another, and some in memory; parts begin with a panel or
    inside of one."""
    mapped, one, other = MappedTensors(), random(200, 48), random(128, 48)
    parts = [one[7 : 7 + first], other, random(5, 48)]
    wanted = pack_parts(parts, torch.float32, None)
    with stored(one, tmp_path / "one", mapped), stored(other, tmp_path / "other", mapped, before=0):
        got = pack_parts(parts, torch.float32, None, mapped=mapped)
    assert torch.equal(got.data, wanted.data)


def test_contiguous_views_have_positions_in_the_file(tmp_path: Path) -> None:
    mapped, weight = MappedTensors(), random(10, 8)
    with stored(weight, tmp_path / "weight", mapped) as file:
        assert mapped.position(weight) == (file, 13)
        assert mapped.position(weight[3:7]) == (file, 13 + 3 * 32)
        assert mapped.position(weight.view(2, 5, 8)[1]) == (file, 13 + 5 * 32)
        for other in (weight.t(), weight[:, :4], weight.clone(), weight.double(), random(10, 8)):
            assert mapped.position(other) is None
        mapped.add(weight[:0], FilePosition(file, 5))  # an empty tensor at the same address
        assert mapped.position(weight) == (file, 13)


def test_converted_weight_is_packed_from_memory(tmp_path: Path) -> None:
    mapped, weight = MappedTensors(), random(70, 24)
    wanted = pack_parts([weight.bfloat16()], torch.bfloat16, None)
    with stored(weight, tmp_path / "weight", mapped):
        got = pack_parts([weight], torch.bfloat16, None, mapped=mapped)
    assert torch.equal(got.data, wanted.data)


@pytest.mark.parametrize("quantization", FORMATS, ids=["plain", "int8", "int4"])
def test_truncated_file_is_reported(quantization: Quantization | None, tmp_path: Path) -> None:
    mapped, weight, path = MappedTensors(), random(300, 64), tmp_path / "weight"
    with stored(weight, path, mapped):
        os.truncate(path, 13 + weight.nbytes - 1)
        with pytest.raises(ModelError, match=r"weight cannot be read: it ends too early. Download"):
            pack_parts([weight], torch.float32, quantization, mapped=mapped)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_unreadable_file_is_reported() -> None:
    """Nothing is mapped at the address 0 of a process."""
    mapped, weight = MappedTensors(), random(300, 64)
    with FileIO("/proc/self/mem") as file:
        mapped.add(weight, FilePosition(file, 0))
        with pytest.raises(
            ModelError, match=r"/proc/self/mem cannot be read: .*Input/output error"
        ):
            pack_parts([weight], torch.float32, None, mapped=mapped)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("quantization", FORMATS[1:], ids=["int8", "int4"])
def test_nonfinite_weights_cannot_be_quantised(
    quantization: Quantization, value: float, tmp_path: Path
) -> None:
    mapped, weight = MappedTensors(), random(65, 40)
    weight[64, 39] = value
    with (
        stored(weight, tmp_path / "weight", mapped),
        pytest.raises(ConfigError, match=r"\[65, 40\] holds values that are not finite"),
    ):
        pack_parts([weight], torch.float32, quantization, mapped=mapped)
