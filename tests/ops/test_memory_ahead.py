"""Memory of blocks is handed out before it is used, and stays as it is."""

import resource
import sys
import threading

import numpy as np
import pytest
import torch

from quire.ops.blocks import host_blocks as memory_ahead
from quire.ops.blocks.host_blocks import HostBlocks, PageAllocator
from quire.ops.host import host_memory, pages
from tests.support.processes.forks import run_forked

PAGE = 4096
Span = tuple[int, int]


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "quire-memory":
            thread.join(30.0)
            assert not thread.is_alive()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Span]:
    """Addresses and bytes that were asked for."""
    found: list[Span] = []

    def note(address: int, num_bytes: int) -> bool:
        found.append((address, num_bytes))
        return True

    monkeypatch.setattr(memory_ahead, "populate", note)
    return found


def blocks_in(spans: list[Span], kv: torch.Tensor, dim: int) -> set[tuple[int, int]]:
    """Which blocks of which part of the tensor are covered, by counting bytes."""
    per_block = kv[(0,) * (dim + 1)].nbytes
    bytes_ = [b for start, num in spans for b in range(start, start + num, per_block)]
    return {divmod((b - kv.data_ptr()) // per_block, kv.shape[dim]) for b in bytes_}


@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 10, 8), 2), ((10, 4, 4), 0)])
def test_so_many_blocks_are_ready_ahead_of_the_last_one(
    spans: list[Span], shape: tuple[int, ...], dim: int
) -> None:
    kv = torch.zeros(shape)
    allocator = PageAllocator(kv, dim, 4 * kv.nbytes // 10)
    num_parts = int(np.prod(shape[:dim]))

    def ready(num: int) -> set[tuple[int, int]]:
        return {(part, block) for part in range(num_parts) for block in range(num)}

    for used, num_ready in ((-1, 4), (1, 4), (2, 7), (0, 7), (9, 10), (9, 10)):
        allocator.use(used)
        wait_for_threads()
        assert blocks_in(spans, kv, dim) == ready(num_ready)
    assert sum(num for _, num in spans) == kv.nbytes  # none of it twice


ENDLESS = """
import torch
from quire.ops.blocks import host_blocks as memory_ahead
memory_ahead.PIECE_BYTES, memory_ahead.populate = 1, lambda *_: True
memory_ahead.PageAllocator(torch.zeros(1 << 26, 1), 0, 1 << 40).use(-1)
print("ends")
"""


def test_a_process_ends_while_memory_is_handed_out() -> None:
    """Which would take minutes here. A fork waits for its threads, as an interpreter does."""
    found = run_forked([sys.executable, "-c", ENDLESS])
    assert (found.returncode, found.stdout, found.stderr) == (0, "ends\n", "")


def test_who_has_ended_asks_for_nothing_more(spans: list[Span]) -> None:
    allocator = PageAllocator(torch.zeros(10, 4), 0, 1 << 20)
    allocator.end()
    allocator.use(-1)
    wait_for_threads()
    assert not spans


def test_host_blocks_are_ready_where_stores_and_loads_write(spans: list[Span]) -> None:
    kv = torch.zeros(2, 6, 4, 8)
    host = HostBlocks([kv], dim=1, num_blocks=[20])
    host.write(0, 3, bytes(host.block_bytes(0)))
    host.free_mirrors()
    wait_for_threads()
    assert not spans  # nobody waits for these
    host.allocate_early()
    wait_for_threads()
    (mirror,) = host.regions()
    assert mirror in spans
    on_device = [span for span in spans if span != mirror]
    assert blocks_in(on_device, kv, 1) == {(part, block) for part in (0, 1) for block in range(6)}
    spans.clear()
    host.free_mirrors()
    host.write(0, 0, bytes(host.block_bytes(0)))
    wait_for_threads()
    assert spans == host.regions()  # of the new mirror


def test_what_is_written_stays_and_new_pages_are_there() -> None:
    memory = host_memory.lazy_zeros((4 << 20,), torch.uint8, torch.device("cpu"))
    values = memory.numpy()
    values[PAGE * 7 + 3] = 9
    if not pages.populate(memory.data_ptr(), memory.nbytes):
        pytest.skip("the system cannot hand out memory ahead")
    assert values[PAGE * 7 + 3] == 9 and values.sum() == 9
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    values[::PAGE] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 10  # of 1,024 pages


def test_memory_that_is_not_ours_is_told() -> None:
    assert not pages.populate(1 << 62, PAGE)
