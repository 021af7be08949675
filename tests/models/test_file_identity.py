"""Different weights have different identities, even if size and modification time are equal."""

import json
import os
import struct
from pathlib import Path

import pytest

from quire.models.load import cache_files as module
from quire.models.load.cache_files import file_identity

TENSORS = {"a": (0, 70_000_000), "b": (70_000_000, 70_000_900), "c": (70_000_900, 80_000_000)}


def write_large(path: Path) -> int:
    """Write a sparse safetensors file; return where its data begins."""
    entries = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in TENSORS.items()
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 80_000_000)
    return 8 + len(header)


def change(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes in place, and restore the modification time."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


@pytest.mark.parametrize("offset", [0, 7, 4096 * 40 + 1, 999_999])
def test_every_byte_of_a_small_file_changes_the_identity(offset: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1_000_000))
    before = file_identity(path)
    change(path, offset, b"x")
    assert file_identity(path) != before


@pytest.mark.parametrize("name", TENSORS)
def test_a_changed_tensor_of_a_large_file_changes_the_identity(name: str, tmp_path: Path) -> None:
    """Also for a tensor between the evenly spread pages, as `b` is."""
    path = tmp_path / "model.safetensors"
    start = write_large(path)
    assert path.stat().st_size > module.WHOLE_BYTES
    before = file_identity(path)
    assert file_identity(path) == before
    begin, end = TENSORS[name]
    change(path, start + begin, b"\1" * min(end - begin, 20_000_000))
    assert file_identity(path) != before


def test_a_long_header_is_hashed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    monkeypatch.setattr(module, "MIN_START_BYTES", 16)
    monkeypatch.setattr(module, "PAGES", 2)
    before = file_identity(path)
    name = path.read_bytes()[:200].index(b'"dtype"')
    change(path, name, b'"dtypf"')
    assert file_identity(path) != before


def test_a_large_file_is_read_in_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    write_large(path)
    reads, pread = [], os.pread

    def counting_pread(file: int, num_bytes: int, offset: int) -> bytes:
        reads.append(offset)
        return pread(file, num_bytes, offset)

    monkeypatch.setattr(module.os, "pread", counting_pread)
    file_identity(path)
    assert module.PAGES <= len(reads) <= module.PAGES + len(TENSORS)


@pytest.mark.parametrize("spans", [[-5, 3], [0, 1 << 70], ["x", 1], 7])
def test_a_hostile_header_is_hashed_like_any_other(spans: object, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"a": {"dtype": "U8", "shape": [3], "data_offsets": spans}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(70_000_000)
    before = file_identity(path)
    change(path, 69_999_999, b"x")
    assert file_identity(path) != before
