"""A rank that checks every exchange: python -m tests.support.engine.exchanges STORE RANK cuda."""

import sys

import torch

from quire.ops.collective import RankGroup
from quire.ops.collectives.torch_group import file_store, gloo_group, nccl_group
from tests.ops.test_collectives import DTYPES, exchange_all

SIZE = 2
WARM_UPS = 3  # before a graph records, as torch asks for


def check(path: str, rank: int, device: torch.device) -> None:
    """As one of two, over NCCL or, of CPUs, gloo. Small and large, summed by the backend (16 bits
    are rounded as it likes) and in order; on a GPU recorded as a graph, too."""
    for in_order in (False, True):
        store = file_store(f"{path} {in_order}", SIZE)
        if device.type == "cpu":
            group = gloo_group(store, rank, SIZE, in_order=in_order)
        else:
            group = nccl_group(store, rank, SIZE, device, in_order=in_order)
        for dtype in DTYPES:
            if in_order or dtype.itemsize > 2:
                exchange_all(group, dtype, device=device)
        exchange_all(group, torch.float32, sizes=(1 << 19,), device=device)
        if device.type == "cuda":
            replay(group, device)


def replay(group: RankGroup, device: torch.device) -> None:
    """Record sums, and replay them with other numbers."""
    x = torch.zeros(1000, device=device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            group.all_reduce(x.clone())
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        total = group.all_reduce(x + 1.0)
        gathered = group.all_gather(x)
    for number in (0.0, 5.0):
        x.fill_(number + group.rank)
        graph.replay()
        torch.cuda.synchronize(device)
        assert torch.equal(total, torch.full_like(total, 2 * number + 1 + SIZE))
        assert gathered[:, 0].tolist() == [number, number + 1.0]


if __name__ == "__main__":
    number = int(sys.argv[2])
    place = torch.device(sys.argv[3], number)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    check(sys.argv[1], number, place)
