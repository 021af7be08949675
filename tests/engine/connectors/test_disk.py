"""The directory store: shared, of limited size, and without errors when the disk fails."""

import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import quire.engine.connectors.disk as module
import quire.engine.connectors.trim as trim
from quire.base.clock import FakeClock
from quire.base.errors import ConfigError
from quire.engine.connectors.disk import LAYOUT, OLD_S, PAUSE_S, TOUCH_S, DiskStore
from quire.engine.connectors.make import make_store
from quire.engine.connectors.store import block_key
from tests.support.engine.stores import FINGERPRINT, digest, key

PLENTY = 1 << 30
SIZE = 1000


def value(i: int) -> bytes:
    return bytes([i % 256]) * SIZE


def got(store: DiskStore, *numbers: int) -> list[bytes | None]:
    values = store.get([key(i) for i in numbers])
    return [None if v is None else bytes(v) for v in values]


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def used_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in files(directory))


def file_of(directory: Path, i: int) -> Path:
    [path] = directory.rglob(f"{digest(i).hex()}.kv")
    return path


def make_old(directory: Path, i: int, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(file_of(directory, i), (then, then))


# ---- keeping and finding -----------------------------------------------------------------------


def test_values_are_returned_whole_and_in_order(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", PLENTY)
    assert got(store, 1) == [None]
    parts: dict[int, Sequence[bytes]] = {
        1: [b"head", memoryview(b"data")],
        2: [b""],
        3: [b"a", b"", b"b" * 3_000_000],
    }
    for i, pieces in parts.items():
        assert store.put(key(i), pieces)
    numbers = [3, 7, 1, *range(20, 40), 2, 3]
    expected = [b"".join(parts[i]) if i in parts else None for i in numbers]
    assert got(store, *numbers) == expected
    assert store.find([key(i) for i in numbers]) == [i in parts for i in numbers]
    assert store.put(key(1), [b"new"])
    assert got(store, 1) == [b"new"]
    store.close()


def test_paths_identify_blocks_and_only_the_owner_may_read(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", PLENTY)
    store.put(block_key(FINGERPRINT, 3, digest(1)), [b"x"])
    name = digest(1).hex()
    [path] = files(tmp_path)
    fan_out = tmp_path / "kv" / LAYOUT / FINGERPRINT.hex() / "3" / name[:2]
    assert path == fan_out / f"{name}.kv"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    others = [block_key(bytes(32), 3, digest(1)), block_key(FINGERPRINT, 4, digest(1))]
    assert store.find(others) == [False, False]


def test_two_engines_share_a_directory(tmp_path: Path) -> None:
    one, other = DiskStore(tmp_path, PLENTY), DiskStore(tmp_path, PLENTY)
    one.put(key(1), [value(1)])
    assert other.find([key(1)]) == [True]
    assert got(other, 1) == [value(1)]


def test_reader_that_stops_early_leaves_no_open_files(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, PLENTY)
    for i in range(20):
        store.put(key(i), [value(i)])
    before = len(os.listdir("/dev/fd"))
    values = store.get([key(i) for i in range(20)])
    next(values)
    values.close()  # type: ignore[attr-defined]
    assert len(os.listdir("/dev/fd")) == before


def test_deleted_file_is_a_miss(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, PLENTY)
    for i in range(module.NUM_PREFETCHED + 2):
        store.put(key(i), [value(i)])
    values = store.get([key(i) for i in range(module.NUM_PREFETCHED + 2)])
    assert next(values) == value(0)
    for path in files(tmp_path):
        path.unlink()
    rest = [None if v is None else bytes(v) for v in values]
    # Files that were open are read; the others are misses.
    assert rest == [value(i) for i in range(1, module.NUM_PREFETCHED)] + [None, None]


# ---- the limit ---------------------------------------------------------------------------------


def test_least_recently_used_files_are_deleted_first(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 10 * SIZE)
    for i in range(10):
        assert store.put(key(i), [value(i)])
        make_old(tmp_path, i, age_s=1000 - 10 * i)
    assert got(store, 0) == [value(0)]  # used: now the newest
    assert time.time() - file_of(tmp_path, 0).stat().st_mtime < TOUCH_S + 60
    assert store.put(key(10), [value(10)])
    assert used_bytes(tmp_path) <= 10 * SIZE
    found = store.find([key(i) for i in range(11)])
    assert found[0] and found[10] and not found[1]
    gone = found.index(True, 1)
    assert found == [True] + [False] * (gone - 1) + [True] * (11 - gone)  # only the oldest
    assert gone <= 3


def test_size_stays_within_the_limit_after_every_put(tmp_path: Path) -> None:
    clock = FakeClock()
    store = DiskStore(tmp_path, 10 * SIZE, clock)
    for i in range(60):
        assert store.put(key(i), [value(i)[: 100 + 37 * i % 900]])
        assert used_bytes(tmp_path) <= 10 * SIZE
        clock.advance(1.0)
    assert used_bytes(tmp_path) > 7 * SIZE  # most of the limit is used
    assert not store.put(key(99), [bytes(10 * SIZE + 1)])
    assert store.put(key(99), [bytes(10 * SIZE)])
    assert used_bytes(tmp_path) == 10 * SIZE


def test_files_of_other_engines_count_and_may_be_deleted(tmp_path: Path) -> None:
    clock = FakeClock()
    one, other = (DiskStore(tmp_path, 20 * SIZE, clock) for _ in range(2))
    for i in range(18):
        other.put(key(i), [value(i)])
        make_old(tmp_path, i, age_s=100)
    for i in range(20, 36):
        assert one.put(key(i), [value(i)])
        assert used_bytes(tmp_path) <= 20 * SIZE
    assert sum(other.find([key(i) for i in range(18)])) <= 4
    # The next sweep, after a minute at the latest, counts the files of both.
    for i in range(40, 60):
        clock.advance(trim.SWEEP_S)
        assert (one, other)[i % 2].put(key(i), [value(i)])
        assert used_bytes(tmp_path) <= 20 * SIZE


def test_file_that_was_read_since_the_sweep_is_not_deleted(tmp_path: Path) -> None:
    clock = FakeClock()
    store = DiskStore(tmp_path, 32 * SIZE, clock)
    for i in range(32):
        store.put(key(i), [value(i)])
        make_old(tmp_path, i, age_s=1000 - i)
    clock.advance(trim.SWEEP_S)
    assert store.put(key(32), [value(32)])  # sweeps; deletes 0 and some more
    first = store.find([key(i) for i in range(32)]).index(True)
    assert got(store, first) == [value(first)]
    for i in range(33, 36):
        assert store.put(key(i), [value(i)])
    assert store.find([key(first), key(first + 1)]) == [True, False]


def test_large_directory_is_counted_in_parts_before_the_first_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = DiskStore(tmp_path, PLENTY)
    for i in range(50):
        before.put(key(i), [value(i)])
        make_old(tmp_path, i, age_s=100)
    monkeypatch.setattr(trim, "FILES_PER_CALL", 60)
    store = DiskStore(tmp_path, 40 * SIZE)
    results = [store.put(key(i), [value(i)]) for i in range(100, 120)]
    first = results.index(True)
    assert 1 <= first < 10 and all(results[first:])
    assert used_bytes(tmp_path) <= 40 * SIZE
    assert got(store, 119) == [value(119)]


# ---- what goes wrong ---------------------------------------------------------------------------


def test_old_temporary_files_are_deleted(tmp_path: Path) -> None:
    clock = FakeClock()
    store = DiskStore(tmp_path, PLENTY, clock)
    store.put(key(1), [value(1)])
    temporary = tmp_path / LAYOUT / "tmp"
    old, young = temporary / "1-a-1.tmp", temporary / "2-a-1.tmp"
    for path in (old, young):
        path.write_bytes(b"half")
    then = time.time() - OLD_S - 60
    os.utime(old, (then, then))
    DiskStore(tmp_path, PLENTY)
    assert not old.exists() and young.exists()
    os.utime(young, (then, then))
    store.put(key(2), [value(2)])
    assert young.exists()
    clock.advance(OLD_S)
    store.put(key(3), [value(3)])
    assert not young.exists()


def refuse_for_a_while(store: DiskStore, clock: FakeClock, log: pytest.LogCaptureFixture) -> str:
    """Assert that puts fail with one warning, without retries. Return the warning."""
    with log.at_level(logging.WARNING):
        assert not store.put(key(50), [value(50)])
        clock.advance(PAUSE_S - 1)
        assert not store.put(key(51), [value(51)])
    [record] = log.records
    log.clear()
    clock.advance(2)
    return record.getMessage()


def test_deleted_directory_is_created_again_after_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    store = DiskStore(tmp_path / "kv", PLENTY, clock)
    store.put(key(1), [value(1)])
    shutil.rmtree(tmp_path / "kv")
    warning = refuse_for_a_while(store, clock, caplog)
    assert "no KV blocks are stored in" in warning and "No such file" in warning
    assert not (tmp_path / "kv").exists()
    assert got(store, 1) == [None] and store.find([key(1)]) == [False]
    assert store.put(key(2), [value(2)])
    assert got(store, 2) == [value(2)]
    shutil.rmtree(tmp_path / "kv" / LAYOUT)  # the store's own folders are created without a warning
    assert store.put(key(3), [value(3)])
    assert got(store, 3) == [value(3)]


def test_missing_parent_of_the_directory_is_not_created(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    store = DiskStore(tmp_path / "mount" / "kv", PLENTY, clock)
    shutil.rmtree(tmp_path / "mount")
    refuse_for_a_while(store, clock, caplog)
    refuse_for_a_while(store, clock, caplog)
    assert not (tmp_path / "mount").exists()


def test_full_disk_stops_puts_and_leaves_no_partial_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk accepts half of a value."""
    clock = FakeClock()
    store = DiskStore(tmp_path, PLENTY, clock)
    store.put(key(1), [value(1)])
    real, rooms = os.writev, [SIZE // 2]

    def writev(file: int, parts: Sequence[memoryview]) -> int:
        if not rooms:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, [parts[0][: rooms.pop()]])

    monkeypatch.setattr(os, "writev", writev)
    assert "No space left on device" in refuse_for_a_while(store, clock, caplog)
    assert [path.name for path in files(tmp_path)] == [f"{digest(1).hex()}.kv"]
    assert got(store, 1) == [value(1)]
    assert "No space" in refuse_for_a_while(store, clock, caplog)  # retried, with another warning
    monkeypatch.setattr(os, "writev", real)
    assert store.put(key(50), [value(50)])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real = DiskStore(tmp_path, PLENTY), os.writev
    monkeypatch.setattr(os, "writev", lambda file, parts: real(file, [parts[0][:7]]))
    assert store.put(key(1), [b"head", b"0123456789" * 5, b"", b"tail"])
    assert got(store, 1) == [b"head" + b"0123456789" * 5 + b"tail"]


def test_puts_leave_a_share_of_the_disk_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()

    class Facts:
        f_frsize, f_blocks, f_bavail = 4096, 10**9 // 4096, 50_000_000 // 4096 + 2

    store = DiskStore(tmp_path, PLENTY, clock)
    monkeypatch.setattr(os, "statvfs", lambda path: Facts)
    assert store.put(key(1), [value(1)])  # 50 MB are 5 % of 1 GB
    Facts.f_bavail -= 2
    warning = refuse_for_a_while(store, clock, caplog)
    assert "must keep 0.05 GB free" in warning
    Facts.f_blocks, Facts.f_bavail = 10**15 // 4096, (10**9 + 10_000) // 4096
    assert store.put(key(1), [value(1)])  # on a large disk, 1 GB stays free


def test_read_only_disk_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    DiskStore(tmp_path, PLENTY).put(key(1), [value(1)])
    make_old(tmp_path, 1, age_s=100)

    def refused(*arguments: object, **others: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    real = os.open
    for name in ("mkdir", "makedirs", "rename", "unlink", "utime"):
        monkeypatch.setattr(os, name, refused)
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *rest: (refused if flags & os.O_CREAT else real)(path, flags, *rest),
    )
    store = DiskStore(tmp_path, PLENTY, clock)
    assert "Read-only file system" in refuse_for_a_while(store, clock, caplog)
    assert got(store, 1) == [value(1)]


def test_unusable_directory_or_limit_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created .*; give another one"):
        DiskStore(tmp_path / "file" / "kv", PLENTY)
    with pytest.raises(ConfigError, match="max_bytes of a store must be positive, got 0"):
        DiskStore(tmp_path, 0)


def test_store_is_made_from_its_setting(tmp_path: Path) -> None:
    store = make_store(f"dir:{tmp_path}/a:b", PLENTY)
    assert store.put(key(1), [value(1)])
    assert (tmp_path / "a:b").is_dir()
    for setting in ("", "disk", "dir:", ":x"):
        with pytest.raises(ConfigError, match="such as dir:/var/cache/kv, got .*names are dir"):
            make_store(setting, PLENTY)
    with pytest.raises(ConfigError, match="there is no KV store 'tape'; there are dir"):
        make_store("tape:0", PLENTY)


# ---- removing ----------------------------------------------------------------------------------


def test_removed_blocks_are_gone_for_all_engines(tmp_path: Path) -> None:
    store, other = DiskStore(tmp_path, PLENTY), DiskStore(tmp_path, PLENTY)
    for i in range(4):
        store.put(key(i), (value(i),))
    other.remove([key(1), key(9), key(3)])
    assert store.find([key(i) for i in range(4)]) == [True, False, True, False]
    assert got(DiskStore(tmp_path, PLENTY), 0, 1, 2, 3) == [value(0), None, value(2), None]
    store.remove([])
    DiskStore(tmp_path / "nothing yet", PLENTY).remove([key(1)])
    assert store.put(key(1), (value(1),)) and got(other, 1) == [value(1)]


def test_failed_removal_is_raised_and_other_blocks_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = DiskStore(tmp_path, PLENTY)
    for i in range(3):
        store.put(key(i), (value(i),))
    protected, unlink = str(file_of(tmp_path, 0)), os.unlink

    def refuse(path: str) -> None:
        if path == protected:
            raise PermissionError(errno.EACCES, "not yours")
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(OSError, match="not yours"):
        store.remove([key(0), key(1), key(2)])
    assert store.find([key(0), key(1), key(2)]) == [True, False, False]
