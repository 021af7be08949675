"""Memory of blocks is populated before it is used, and keeps its contents."""

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
    """Record the addresses and sizes that are populated."""
    found: list[Span] = []

    def note(address: int, num_bytes: int) -> bool:
        found.append((address, num_bytes))
        return True

    monkeypatch.setattr(memory_ahead, "populate", note)
    return found


def blocks_in(spans: list[Span], kv: torch.Tensor, dim: int) -> set[tuple[int, int]]:
    """Return the blocks of each part of the tensor that are covered, by counting bytes."""
    per_block = kv[(0,) * (dim + 1)].nbytes
    bytes_ = [b for start, num in spans for b in range(start, start + num, per_block)]
    return {divmod((b - kv.data_ptr()) // per_block, kv.shape[dim]) for b in bytes_}


@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 10, 8), 2), ((10, 4, 4), 0)])
def test_blocks_after_the_last_used_one_are_populated(
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


def test_process_can_end_while_memory_is_populated() -> None:
    """Here that would take minutes. A fork waits for its threads, as an interpreter does."""
    found = run_forked([sys.executable, "-c", ENDLESS])
    assert (found.returncode, found.stdout, found.stderr) == (0, "ends\n", "")


def test_ended_allocator_populates_nothing(spans: list[Span]) -> None:
    allocator = PageAllocator(torch.zeros(10, 4), 0, 1 << 20)
    allocator.end()
    allocator.use(-1)
    wait_for_threads()
    assert not spans


def test_host_blocks_populate_mirrors_and_device_memory_early(spans: list[Span]) -> None:
    kv = torch.zeros(2, 6, 4, 8)
    host = HostBlocks([kv], dim=1, num_blocks=[20])
    host.write(0, 3, bytes(host.block_bytes(0)))
    host.free_mirrors()
    wait_for_threads()
    assert not spans  # only after allocate_early
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


def test_populate_keeps_contents_and_adds_pages() -> None:
    memory = host_memory.lazy_zeros((4 << 20,), torch.uint8, torch.device("cpu"))
    values = memory.numpy()
    values[PAGE * 7 + 3] = 9
    if not pages.populate(memory.data_ptr(), memory.nbytes):
        pytest.skip("the system cannot hand out memory ahead")
    assert values[PAGE * 7 + 3] == 9 and values.sum() == 9
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    values[::PAGE] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 10  # of 1,024 pages


def test_populate_reports_foreign_memory() -> None:
    assert not pages.populate(1 << 62, PAGE)
