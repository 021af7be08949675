"""A file that a full disk truncates never replaces a complete one."""

import errno
import os
from pathlib import Path

import pytest

from quire.base import files as durable
from quire.base.files import replace_file, write_all

NEW = b"a new value that takes more than one write"


def test_partial_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(durable.os, "write", lambda fd, data: write(fd, bytes(data)[:5]))
    replace_file(tmp_path / "value", NEW, tmp_path / "value.tmp")
    assert (tmp_path / "value").read_bytes() == NEW


def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "value").write_bytes(b"old")
    write, room = os.write, [10]

    def limited(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "no space")
        num = write(fd, bytes(data)[: room[0]])
        room[0] -= num
        return num

    monkeypatch.setattr(durable.os, "write", limited)
    with pytest.raises(OSError, match="no space"):
        replace_file(tmp_path / "value", NEW, tmp_path / "value.tmp")
    assert [path.name for path in tmp_path.iterdir()] == ["value"]
    assert (tmp_path / "value").read_bytes() == b"old"


def test_write_to_a_full_device_raises_enospc() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError) as raised:
            write_all(fd, NEW)
    finally:
        os.close(fd)
    assert raised.value.errno == errno.ENOSPC
