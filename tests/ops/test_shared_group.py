"""Ranks that share memory: threads with a mapping each, and a process that is killed."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.base.errors import EngineError, RankLost
from quire.ops.collective import RankGroup
from quire.ops.collectives.shared_group import SharedGroup
from quire.ops.host.native import core
from tests.ops.test_collectives import DTYPES, exchange_all, part

pytestmark = pytest.mark.skipif(core() is None, reason="the C++ core was not built")

OTHER = """
import sys, time
from quire.ops.host.native import core
group = core().SharedGroup(sys.argv[1], 1, 2, 4096, 30.0)
memory = bytearray(4096)
import ctypes
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
group.all_reduce(address, 1024, 0, 1)
print("met", flush=True)
time.sleep(60)
"""


def share(
    path: Path, size: int, work: Callable[[SharedGroup], None], slot_bytes: int = 4096
) -> None:
    """Run threads as ranks, each with its own mapping, like processes."""
    groups = [
        SharedGroup(str(path), rank, size, slot_bytes=slot_bytes, timeout_s=30)
        for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as pool:
        for future in [pool.submit(work, group) for group in groups]:
            future.result()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_exchange_in_pieces(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    share(tmp_path / "ranks", size, lambda group: exchange_all(group, dtype))


def test_thousands_of_exchanges_stay_in_step(tmp_path: Path) -> None:
    numbers = [part(rank, (3000,), torch.float32) for rank in range(3)]

    def work(group: SharedGroup) -> None:
        for i in range(1000):
            count = 1 + 37 * i % 3000
            total = group.all_reduce(numbers[group.rank][:count] + i)
            assert torch.equal(
                total, numbers[0][:count] + i + (numbers[1][:count] + i) + (numbers[2][:count] + i)
            )
        assert group.seconds > 0

    share(tmp_path / "ranks", 3, work)


def test_memory_may_be_anonymous() -> None:
    file = os.memfd_create("ranks")
    share(Path(f"/proc/self/fd/{file}"), 2, lambda group: exchange_all(group, torch.float32))
    os.close(file)


def test_abort_of_a_rank_wakes_the_waiting_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "ranks")
    waiting, other = (SharedGroup(path, rank, 2, timeout_s=30) for rank in range(2))
    threading.Timer(0.3, other.abort).start()
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"Rank 1 of 2 .* has given up"):
        waiting.all_reduce(torch.ones(3))
    assert 0.25 < time.monotonic() - began < 0.3 + 0.2
    for group in (waiting, other):
        with pytest.raises(RankLost, match="given up"):
            group.all_gather(torch.ones(3))


def test_wait_for_a_missing_rank_times_out(tmp_path: Path) -> None:
    path = str(tmp_path / "ranks")
    alone = SharedGroup(path, 0, 2, timeout_s=0.1)
    with pytest.raises(RankLost, match=r"Rank 1 of 2 .* did not come in time"):
        alone.all_reduce(torch.ones(3))


def test_killed_process_is_detected_immediately(tmp_path: Path) -> None:
    path = str(tmp_path / "ranks")
    group: RankGroup = SharedGroup(path, 0, 2, slot_bytes=4096, timeout_s=30)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, path], stdout=subprocess.PIPE, text=True
    ) as other:
        group.all_reduce(torch.ones(1024))
        assert other.stdout is not None and other.stdout.readline() == "met\n"
        killed: list[float] = []

        def kill() -> None:
            other.kill()
            killed.append(time.monotonic())

        threading.Timer(0.1, kill).start()
        with pytest.raises(RankLost, match=r"Rank 1 of 2 .* is gone"):
            group.all_reduce(torch.ones(1024))
        assert time.monotonic() - killed[0] < 0.2  # it is not reaped yet


def test_mismatched_ranks_are_rejected(tmp_path: Path) -> None:
    path = str(tmp_path / "ranks")
    first = SharedGroup(path, 0, 2)
    with pytest.raises(EngineError, match="Rank 0 is there already"):
        SharedGroup(path, 0, 2)
    with pytest.raises(EngineError, match="how many they are: 2 and 3"):
        SharedGroup(path, 1, 3)
    with pytest.raises(EngineError, match="size of their slots"):
        SharedGroup(path, 1, 2, slot_bytes=4096)
    with pytest.raises(EngineError, match="Cannot open"):
        SharedGroup(str(tmp_path / "nowhere" / "ranks"), 1, 2)
    assert first.size == 2
