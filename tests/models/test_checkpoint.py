"""Headers of safetensors files: names and shapes, and damaged or hostile files."""

import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.base.errors import ModelError
from quire.models.checkpoint.files import safetensors_shapes, weight_files
from tests.support.models.checkpoints import write_checkpoint


def write_file(path: Path, header: bytes, length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    return path


def test_headers_give_names_and_shapes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(0)}, file, metadata={"format": "pt"})
    assert safetensors_shapes([file]) == {"a": (3, 4), "b": (0,)}


def test_shapes_come_from_all_shards(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "llama", max_shard_size="20KB")
    files = weight_files(tmp_path)
    assert len(files) > 1
    shapes = safetensors_shapes(files)
    wanted = {name: tuple(t.shape) for name, t in checkpoint.model.state_dict().items()}
    assert shapes == wanted


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"", 1),
        (b"{}", 1 << 62),
        (b"{", None),
        (b"\xff\xfe", None),
        (b"[]", None),
        (b"[" * 200_000, None),
        (b'{"a": 3}', None),
        (b'{"a": {}}', None),
        (b'{"a": {"shape": 3}}', None),
        (b'{"a": {"shape": [-1]}}', None),
        (b'{"a": {"shape": ["x"]}}', None),
    ],
)
def test_damaged_headers_are_refused(header: bytes, length: int | None, tmp_path: Path) -> None:
    file = write_file(tmp_path / "model.safetensors", header, length)
    with pytest.raises(ModelError, match=r"model.safetensors is not a valid.*Download it again"):
        safetensors_shapes([file])


def test_missing_and_short_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(ModelError, match="cannot be read"):
        safetensors_shapes([file])
    file.write_bytes(b"\x01\x00")
    with pytest.raises(ModelError, match="too short"):
        safetensors_shapes([file])
