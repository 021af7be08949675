"""Ranks that exchange by gloo, as threads with a process group each; the error without NCCL."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.base.errors import ConfigError, RankLost
from quire.ops.collectives.torch_group import TorchGroup, file_store, gloo_group, nccl_group
from tests.ops.test_collectives import DTYPES, exchange_all
from tests.support.engine import exchanges


def meet(path: Path, size: int, work: Callable[[TorchGroup], None], in_order: bool = True) -> None:
    def run(rank: int) -> None:
        store = file_store(str(path), size)
        work(gloo_group(store, rank, size, timeout_s=30, in_order=in_order))

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_exchange_in_order(size: int, tmp_path: Path) -> None:
    def work(group: TorchGroup) -> None:
        for dtype in DTYPES:
            exchange_all(group, dtype, (1, 7, 500))

    meet(tmp_path / "store", size, work)


def test_sums_of_two_ranks_are_the_same_in_any_order(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> None:
        for dtype in (torch.float64, torch.float32, torch.int64):
            exchange_all(group, dtype, (1, 500))

    meet(tmp_path / "store", 2, work, in_order=False)


def test_check_of_two_gpus_passes_on_two_cpus(tmp_path: Path) -> None:
    """`make gpu-check PART=ranks` runs this check with NCCL."""
    with ThreadPoolExecutor(2) as pool:
        path = str(tmp_path / "store")
        list(pool.map(lambda rank: exchanges.check(path, rank, torch.device("cpu")), range(2)))


def test_abort_of_a_rank_wakes_the_waiting_ranks(tmp_path: Path) -> None:
    has_met = threading.Barrier(2)

    def work(group: TorchGroup) -> None:
        group.all_reduce(torch.ones(3))
        has_met.wait()
        if group.rank == 1:
            time.sleep(0.2)
            group.abort()
            has_met.wait()  # its connections stay open
            return
        began = time.monotonic()
        with pytest.raises(RankLost, match="has failed"):
            group.all_reduce(torch.ones(3))
        assert time.monotonic() - began < 2
        with pytest.raises(RankLost):
            group.all_gather(torch.ones(3))
        has_met.wait()

    meet(tmp_path / "store", 2, work)


def test_ended_rank_is_detected(tmp_path: Path) -> None:
    def work(group: TorchGroup) -> None:
        group.all_reduce(torch.ones(3))
        if group.rank == 1:
            return  # this closes its connections
        began = time.monotonic()
        with pytest.raises(RankLost, match="ended or does not answer"):
            group.all_reduce(torch.ones(3))
        assert time.monotonic() - began < 5

    meet(tmp_path / "store", 2, work)


def test_wait_for_a_missing_rank_times_out(tmp_path: Path) -> None:
    store = file_store(str(tmp_path / "store"), 2)
    with pytest.raises(RankLost, match="cannot reach the other ranks"):
        gloo_group(store, 0, 2, timeout_s=0.3)


def test_nccl_needs_a_torch_built_with_it(tmp_path: Path) -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has NCCL")
    with pytest.raises(ConfigError, match="built without"):
        nccl_group(file_store(str(tmp_path / "store"), 1), 0, 1, torch.device("cuda"))
