"""Compare exchanges between ranks, by each kind of group, with results by hand."""

import threading
import time

import pytest
import torch

from quire.base.errors import RankLost
from quire.ops.collective import RankGroup
from quire.ops.collectives.neighbours import neighbours
from quire.ops.collectives.thread_group import run_ranks, thread_groups

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64]


def part(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's input: its own random numbers, rounded to the dtype."""
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (noise * 100).to(dtype)


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum in the order of ranks; 16 bits are rounded once, at the end."""
    wide = [each if each.element_size() > 2 else each.float() for each in parts]
    total = wide[0]
    for each in wide[1:]:
        total = total + each
    return total.to(parts[0].dtype)


def exchange_all(
    group: RankGroup,
    dtype: torch.dtype,
    sizes: tuple[int, ...] = (1, 7, 4000),
    device: torch.device | str = "cpu",
) -> None:
    """Check every exchange of a rank of a group, in several sizes."""
    size, rank = group.size, group.rank
    for num in sizes:
        mine = [part(g, (num, 3), dtype).to(device) for g in range(size)]
        stacked = [part(10 + g, (size, num), dtype).to(device) for g in range(size)]
        assert torch.equal(group.all_reduce(mine[rank].clone()), summed(mine))
        assert torch.equal(group.all_gather(mine[rank]), torch.stack(mine))
        scattered = summed([each[rank] for each in stacked])
        assert torch.equal(group.reduce_scatter(stacked[rank].clone()), scattered)
        sent = torch.stack([each[rank] for each in stacked])
        assert torch.equal(group.all_to_all(stacked[rank]), sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_thread_groups_exchange_correctly(size: int, dtype: torch.dtype) -> None:
    run_ranks(size, lambda group: exchange_all(group, dtype))


def test_neighbours_exchange_only_with_each_other() -> None:
    def work(group: RankGroup) -> list[float]:
        pair = neighbours(group, 2)
        exchange_all(pair, torch.float64, sizes=(7,))
        return pair.all_gather(torch.tensor(10.0 * group.rank)).tolist()

    assert run_ranks(4, work) == [[0.0, 10.0]] * 2 + [[20.0, 30.0]] * 2
    whole = thread_groups(2)[0]
    assert neighbours(whole, 2) is whole and neighbours(whole, 1).size == 1


def test_ranks_do_not_share_the_memory_of_results() -> None:
    def work(group: RankGroup) -> torch.Tensor:
        total = group.all_reduce(torch.ones(5))
        total += group.rank
        group.all_gather(total)
        return total

    first, second = run_ranks(2, work)
    assert first.tolist() == [2.0] * 5 and second.tolist() == [3.0] * 5


def test_abort_of_a_rank_wakes_the_waiting_ranks() -> None:
    waiting, aborting = thread_groups(2)
    timer = threading.Timer(0.05, aborting.abort)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RankLost, match="has failed"):
        waiting.all_reduce(torch.ones(3))
    assert time.monotonic() - began < 5
    with pytest.raises(RankLost):
        waiting.all_gather(torch.ones(3))


def test_run_ranks_raises_the_first_error_of_a_rank() -> None:
    def work(group: RankGroup) -> None:
        if group.rank == 1:
            raise ValueError("not this one")
        group.all_reduce(torch.ones(3))

    with pytest.raises(ValueError, match="not this one"):
        run_ranks(2, work)
