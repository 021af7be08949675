"""The ledger of usage: whole lines in order, even if its file is renamed, removed or full."""

import json
import logging
import os
import threading
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.serve.observers.usage_log import UsageLog, check_usage_log
from tests.support.processes.servers import wait_until


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def append(log: UsageLog, *values: int) -> None:
    for value in values:
        log.append(b'{"n": %d}' % value)


def test_renamed_file_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    path, old = tmp_path / "usage.jsonl", tmp_path / "usage.jsonl.1"
    path.write_text('{"n": 0}\n')  # from an earlier server
    log = UsageLog(path)
    append(log, 1, 2)
    wait_until(lambda: numbers(path) == [0, 1, 2])
    path.rename(old)
    append(log, 3)
    wait_until(lambda: path.exists() and numbers(path) == [3])
    path.unlink()
    append(log, 4, 5)
    log.close()
    assert numbers(old) == [0, 1, 2] and numbers(path) == [4, 5]


def test_lines_of_several_writers_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    logs = [UsageLog(path) for _ in range(3)]
    threads = [
        threading.Thread(target=append, args=(log, *range(i * 1000, i * 1000 + 500)))
        for i, log in enumerate(logs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    found = numbers(path)
    assert sorted(found) == [i * 1000 + n for i in range(3) for n in range(500)]
    first = [n for n in found if n < 1000]
    assert first == sorted(first)


def test_full_disk_blocks_no_writer_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        log = UsageLog(Path("/dev/full"), max_lines=10)
        append(log, *range(50))
        wait_until(lambda: "cannot be written" in caplog.text)
        log.close()
    assert "50 lines of usage could not be written" in caplog.text
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(log._fd)


def test_torn_line_ends_before_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write, calls = tmp_path / "usage.jsonl", os.write, list[int]()

    def short_once(fd: int, data: bytes) -> int:
        calls.append(fd)
        return write(fd, data[:4] if len(calls) == 1 else data)

    monkeypatch.setattr("quire.serve.observers.usage_log.AGAIN_S", 0.001)
    monkeypatch.setattr("quire.serve.observers.usage_log.os.write", short_once)
    log = UsageLog(path)
    append(log, 7, 8)
    wait_until(lambda: path.read_text().endswith("8}\n"))
    monkeypatch.undo()
    log.close()
    torn, *whole = path.read_text().splitlines()
    assert torn == '{"n"' and [json.loads(line)["n"] for line in whole] == [7, 8]


def test_unusable_file_is_rejected_by_name(tmp_path: Path) -> None:
    check_usage_log(None)
    with pytest.raises(ConfigError, match="usage_log='.*nowhere/usage' cannot be opened"):
        check_usage_log(str(tmp_path / "nowhere" / "usage"))
