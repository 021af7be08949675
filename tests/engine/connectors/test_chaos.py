"""Damaged and contended files: a block is returned exactly as it was put, or not at all."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import quire.engine.connectors.disk as module
from quire.base.clock import FakeClock
from quire.base.kv_orders import Fetch, Fetched, Keep, Kept, LookedUp
from quire.engine.connectors.disk import LAYOUT, OLD_S, DiskStore
from quire.engine.connectors.store import BODY, HEADER_BYTES, seal, unseal
from quire.engine.connectors.worker import StoreWorker
from tests.support.engine.stores import (
    BLOCK_BYTES,
    FINGERPRINT,
    PATIENCE_S,
    Answers,
    Memory,
    contents,
    digest,
    fetch,
    items,
    keep,
    key,
    look_up,
    sealed,
)

PLENTY = 1 << 30
SIZE = BLOCK_BYTES[0] + HEADER_BYTES
# Where the fields of the header begin, and the data.
BOUNDARIES = [0, 8, 12, 16, 24, 56, 88, HEADER_BYTES]


class Engine:
    """A worker over a directory. Host blocks 0..99 hold the contents of digests 0..99."""

    def __init__(self, directory: Path, max_bytes: int = PLENTY) -> None:
        self.clock, self.memory, self.answers = FakeClock(), Memory(), Answers()
        self.memory.blocks = {(0, i): contents(i) for i in range(100)}
        self.worker = StoreWorker(
            DiskStore(directory, max_bytes, self.clock),
            FINGERPRINT,
            self.memory,
            self.answers.give,
            self.answers.ring,
            self.clock,
        )

    def keep(self, *numbers: int) -> list[bool]:
        self.worker.submit(keep(*numbers))
        answer = self.answers.take()
        assert isinstance(answer, Kept)
        return answer.ok

    def find(self, *numbers: int) -> list[bool]:
        self.worker.submit(look_up(*numbers))
        answer = self.answers.take()
        assert isinstance(answer, LookedUp)
        return answer.found

    def fetch(self, *numbers: int) -> list[bool]:
        """Fetch into separate host blocks, and assert that each is right or unchanged."""
        mine = b"mine"
        for i in numbers:
            self.memory.blocks[0, 1000 + i] = mine
        order = fetch(*numbers)
        moved = tuple((group, name, 1000 + block) for group, name, block in order.items)
        self.worker.submit(Fetch(0, 1, moved))
        answer = self.answers.take()
        assert isinstance(answer, Fetched)
        for i, ok in zip(numbers, answer.ok, strict=True):
            assert self.memory.blocks[0, 1000 + i] == (contents(i) if ok else mine)
        return answer.ok


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.worker.close(PATIENCE_S)


def file_of(directory: Path, i: int) -> Path:
    [path] = directory.rglob(f"{digest(i).hex()}.kv")
    return path


def damage(engine: Engine, directory: Path, values: list[bytes]) -> None:
    """Assert that none of these values is used as block 1, and that a new keep repairs it."""
    path = file_of(directory, 1)
    good = path.read_bytes()
    for value in values:
        assert value != good
        path.write_bytes(value)
        assert engine.fetch(1, 2) == [False, True]
        assert engine.find(1) == [False]
    assert engine.keep(1) == [True]
    assert path.read_bytes() == good
    assert engine.fetch(1) == [True]


def test_truncated_files_are_misses(engine: Engine, tmp_path: Path) -> None:
    engine.keep(1, 2)
    good, random = sealed(1), np.random.default_rng(2)
    lengths = {max(0, b + i) for b in BOUNDARIES for i in (-1, 0, 1)}
    lengths |= set(random.integers(0, len(good), 30).tolist())
    assert BODY.size in lengths or HEADER_BYTES in lengths
    damage(engine, tmp_path, [good[:length] for length in sorted(lengths)] + [good + b"\0"])


def test_files_with_flipped_bits_are_misses(engine: Engine, tmp_path: Path) -> None:
    """One bit in each byte of the header and in some bytes of the data."""
    engine.keep(1, 2)
    good, random = sealed(1), np.random.default_rng(3)
    places = [*range(HEADER_BYTES), *random.integers(HEADER_BYTES, len(good), 60).tolist()]
    values = []
    for place in places:
        value = bytearray(good)
        value[place] ^= 1 << int(random.integers(8))
        values.append(bytes(value))
    damage(engine, tmp_path, values)


def test_files_of_other_blocks_are_misses(engine: Engine, tmp_path: Path) -> None:
    engine.keep(1, 2)
    data = contents(1)
    other_model = seal(bytes(32), 0, digest(1), data) + data
    other_group = seal(FINGERPRINT, 1, digest(1), data) + data
    short = seal(FINGERPRINT, 0, digest(1), data[:-1]) + data[:-1]
    damage(engine, tmp_path, [other_model, other_group, short, sealed(2), b"", bytes(SIZE)])


def test_folder_or_pipe_instead_of_a_file_is_a_miss(engine: Engine, tmp_path: Path) -> None:
    engine.keep(1, 2)
    path = file_of(tmp_path, 1)
    path.unlink()
    path.mkdir()
    assert engine.fetch(1, 2) == [False, True]
    path.rmdir()
    os.mkfifo(path)  # a plain open would wait for a writer forever
    assert engine.fetch(1, 2) == [False, True]
    assert engine.keep(1) == [True]
    assert engine.fetch(1, 2) == [True, True]


def test_deleted_directory_gives_misses_and_is_created_again(
    engine: Engine, tmp_path: Path
) -> None:
    assert engine.keep(*range(10)) == [True] * 10
    shutil.rmtree(tmp_path)
    assert engine.find(*range(10)) == [False] * 10
    assert engine.fetch(*range(10)) == [False] * 10
    assert engine.keep(1, 2) == [False, False]
    engine.clock.advance(module.PAUSE_S + 1)
    assert engine.keep(1, 2) == [True, True]
    assert engine.fetch(1, 2, 3) == [True, True, False]


@contextlib.contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[bool]:
    """Mount a small file system. Yield False where this is not permitted."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "quire-test", str(directory)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(directory)], check=True, timeout=10)


def test_full_disk_loses_no_stored_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a real file system if one may be mounted, else with simulated errors after some files."""
    with small_disk(tmp_path / "small", 200_000) as is_mounted:
        engine = Engine(tmp_path / "small")
        if is_mounted:
            assert engine.keep(*range(100)).count(True) < 100  # 5 % stay free
            facts = os.statvfs(tmp_path / "small")
            assert facts.f_bavail >= 0.05 * facts.f_blocks
            monkeypatch.setattr(module, "MIN_FREE_SHARE", 0.0)
        else:
            real, left = os.writev, [20]

            def writev(file: int, parts: list[memoryview]) -> int:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(28, "No space left on device")
                return real(file, parts)

            monkeypatch.setattr(os, "writev", writev)
        engine.clock.advance(module.PAUSE_S + 1)
        ok = engine.keep(*range(100))
        assert 10 < ok.count(True) < 100
        assert engine.fetch(*range(100)) == ok
        assert not list((tmp_path / "small").rglob("*.tmp"))
        engine.worker.close(PATIENCE_S)


# ---- several processes -------------------------------------------------------------------------

# Keeps and fetches random blocks, and asserts that fetched ones are right.
PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
from tests.engine.connectors.test_chaos import Engine
directory, seed, max_bytes, seconds, most = Path(sys.argv[1]), *map(int, sys.argv[2:])
engine, random = Engine(directory, max_bytes), np.random.default_rng(seed)
print("ready", flush=True)
end, kept, fetched = time.monotonic() + seconds, 0, 0
while time.monotonic() < end and kept + fetched < most:
    kept += sum(engine.keep(*random.integers(0, 100, 3).tolist()))
    fetched += sum(engine.fetch(*random.integers(0, 100, 3).tolist()))
    engine.clock.advance(0.5)
engine.worker.close(10.0)
print(kept, fetched, engine.worker._work.mover._log.counts)
"""


def start(
    directory: Path, seed: int, max_bytes: int, seconds: int, max_blocks: int = 1 << 60
) -> "subprocess.Popen[str]":
    """max_blocks: blocks that the process keeps and fetches before it ends."""
    numbers = [str(number) for number in (seed, max_bytes, seconds, max_blocks)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), *numbers],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


def test_two_processes_share_a_directory_within_its_limit(tmp_path: Path) -> None:
    """There is room for 40 of 100 blocks. Each process deletes files that the other one uses."""
    max_bytes = 40 * SIZE
    processes = [start(tmp_path, seed, max_bytes, 10, 800) for seed in (1, 2)]
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        ready, line, _ = out.split("\n")
        kept, fetched, throttled = line.split(" ", 2)
        assert ready == "ready" and int(kept) > 100 and int(fetched) > 20
        assert throttled == "{}"  # blocks were missing, but nothing failed
    assert not list(tmp_path.rglob("*.tmp"))
    used = sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
    # Neither counts what the other wrote since its last count: a sixteenth and one block.
    assert 20 * SIZE < used <= max_bytes + 2 * (max_bytes // 16 + SIZE)
    engine = Engine(tmp_path)
    found = engine.find(*range(100))
    assert engine.fetch(*range(100)) == found
    engine.worker.close(PATIENCE_S)


def test_killed_process_leaves_only_whole_blocks(tmp_path: Path) -> None:
    for seed in range(3):
        process = start(tmp_path, seed, PLENTY, 60)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        while not len(list(tmp_path.rglob("*.kv"))) > 10 * seed:
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
    paths = list(tmp_path.rglob("*.kv"))
    names = {digest(i).hex(): i for i in range(100)}
    assert paths
    for path in paths:
        i = names[path.stem]
        assert unseal(path.read_bytes(), FINGERPRINT, 0, digest(i), BLOCK_BYTES[0])[0] is not None
    left = tmp_path / LAYOUT / "tmp" / "1-1-1.tmp"  # in case no process has left one
    left.write_bytes(sealed(1)[:500])
    then = time.time() - OLD_S - 60
    for temporary in tmp_path.rglob("*.tmp"):
        os.utime(temporary, (then, then))
    engine = Engine(tmp_path)
    assert not list(tmp_path.rglob("*.tmp"))
    found = engine.find(*range(100))
    assert sum(found) == len(paths) and engine.fetch(*range(100)) == found
    engine.worker.close(PATIENCE_S)


def test_orders_with_two_groups_and_large_blocks_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BLOCK_BYTES, 0, 3_000_000)
    engine = Engine(tmp_path)
    engine.memory.blocks |= {(1, i): contents(i, group=1) for i in range(50)}
    both = items(1, 2, 3) + items(*range(50), group=1)
    engine.worker.submit(Keep(0, 1, both))
    assert engine.answers.take().ok == [True] * 53
    expected = dict(engine.memory.blocks)
    for group, _, block in both:
        engine.memory.blocks[group, block] = b""
    engine.worker.submit(Fetch(0, 1, both))
    answer = engine.answers.take()
    assert answer == Fetched(0, 1, [True] * 53, 3 * 3_000_000 + 50 * 64, 0.0)
    assert engine.memory.blocks == expected
    assert key(1) != key(1, group=1)
    engine.worker.close(PATIENCE_S)
