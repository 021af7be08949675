"""Compare moves between GPU and host, in any order that a GPU might take, with a plain model."""

import numpy as np
import pytest
import torch

from quire.ops import gpu
from quire.ops.blocks.block_moves import copy_blocks
from quire.ops.blocks.host_blocks import HostBlocks
from quire.ops.blocks.streams import Streams
from quire.ops.rows.row_arrays import last_writes
from tests.support.kernels.late_streams import LateStreams, ThreadStreams

NUM_BLOCKS, NUM_HOST = 6, 9
SHAPES = (
    (2, 1, 2, NUM_BLOCKS, 2, 2),
    (2, 2, 1, NUM_BLOCKS, 1, 3),
)  # of the tensors; blocks are dim 3
SLOTS = {"part_bytes": 130, "num_slots": 3}  # two blocks


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


class Machine:
    """Random moves, and the number that each block must hold: every write has another number."""

    def __init__(self, seed: int, streams: Streams) -> None:
        self.rng = np.random.default_rng(seed)
        self.streams = streams
        self.kv = [torch.zeros(shape) for shape in SHAPES]
        sizes = (NUM_HOST,) * len(SHAPES)
        self.host = HostBlocks(self.kv, dim=3, num_blocks=sizes, streams=streams, **SLOTS)
        self.device_model = np.zeros((len(SHAPES), NUM_BLOCKS))
        self.host_model = np.zeros((len(SHAPES), NUM_HOST))
        self.num_writes = 0

    def some(self, count: int, limit: int) -> np.ndarray:
        return self.rng.integers(limit, size=count).astype(np.int32)

    def new_number(self) -> float:
        self.num_writes += 1
        return float(self.num_writes)

    def step(self) -> None:
        place, count = int(self.rng.integers(len(SHAPES))), int(self.rng.integers(1, 8))
        device = self.some(count, NUM_BLOCKS)
        host = self.rng.permutation(NUM_HOST)[: len(device)].astype(np.int32)
        what = self.rng.integers(6)
        if what == 0:
            self.compute(place, int(device[0]))
        elif what == 1:
            self.host.swap_out(place, device, host)
            self.host_model[place, host] = self.device_model[place, device]
        elif what == 2:
            self.load(place, host, device)
        elif what == 3:
            self.copy(place, device)
        elif what == 4:
            self.check_host(place, int(host[0]))
        else:
            number = self.new_number()
            values = np.full(self.kv[place].numel() // NUM_BLOCKS, number, np.float32)
            self.host.write(place, int(host[0]), values.tobytes())
            self.host_model[place, host[0]] = number

    def compute(self, place: int, block: int) -> None:
        """Write a block, as a step does."""
        number, kv = self.new_number(), self.kv[place]
        self.streams.compute.run(lambda: kv[:, :, :, block].fill_(number))
        self.device_model[place, block] = number

    def load(self, place: int, host: np.ndarray, device: np.ndarray) -> None:
        self.host.load(place, host, device)
        for one, other in zip(host, device, strict=True):
            self.device_model[place, other] = self.host_model[place, one]

    def copy(self, place: int, source: np.ndarray) -> None:
        """Copy blocks, also in chains, and twice to one block."""
        destination, kv = self.some(len(source), NUM_BLOCKS), self.kv[place]
        self.streams.compute.run(lambda: copy_blocks(kv, source, destination, dim=3))
        before = self.device_model[place].copy()
        for one, other in zip(source, destination, strict=True):
            self.device_model[place, other] = before[one]

    def check_host(self, place: int, block: int) -> None:
        values = np.frombuffer(self.host.read(place, block), np.float32)
        assert (values == self.host_model[place, block]).all()

    def check(self) -> None:
        """Check all blocks, also blocks that were never written."""
        self.streams.compute.mark().wait()
        for kv, wanted in zip(self.kv, self.device_model, strict=True):
            got = kv.movedim(3, 0).reshape(NUM_BLOCKS, -1).numpy()
            assert (got == wanted[:, None]).all()
        for place in range(len(SHAPES)):
            for block in range(NUM_HOST):
                self.check_host(place, block)


@pytest.mark.parametrize(
    ("is_late", "has_kernels"),
    [
        pytest.param(True, False, id="late-torch"),
        pytest.param(False, False, id="any_time-torch", marks=pytest.mark.slow),
        pytest.param(True, True, id="late-on_gpu", marks=pytest.mark.slow),
        pytest.param(False, True, id="any_time-on_gpu"),
    ],
)
def test_blocks_equal_the_model_after_random_moves(
    is_late: bool, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(gpu, "is_on_gpu", lambda tensor: True)
    num_steps = 15 if has_kernels else 60
    for seed in range(2 if has_kernels else 40):
        streams = LateStreams(None if is_late else np.random.default_rng(seed))
        machine = Machine(seed, streams)
        for _ in range(num_steps):
            machine.step()
        machine.check()


def test_blocks_equal_the_model_with_threads_as_streams() -> None:
    for seed in range(15):
        machine = Machine(seed, ThreadStreams())
        for _ in range(60):
            machine.step()
        machine.check()


def test_wait_raises_the_error_of_a_failed_task() -> None:
    failed = ThreadStreams().run_task(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ZeroDivisionError):
        failed.wait()
    assert failed.is_done()


def test_swap_out_does_not_wait_while_slots_are_free() -> None:
    streams = LateStreams()
    machine = Machine(0, streams)
    machine.compute(0, 1)
    for _ in range(SLOTS["num_slots"]):
        machine.host.swap_out(0, ids(1, 2), ids(3, 4))
    assert streams.num_done == 0
    machine.host.swap_out(0, ids(1), ids(5))  # a fourth: the first must have arrived
    assert streams.num_done > 0
    machine.check_host(1, 5)


def test_load_waits_only_for_blocks_that_it_reads() -> None:
    streams = LateStreams()
    machine = Machine(0, streams)
    machine.compute(0, 1)
    machine.host.swap_out(0, ids(1), ids(3))
    machine.host.load(0, ids(4), ids(2))
    machine.host.load(1, ids(3), ids(2))  # of another tensor
    assert streams.num_done == 0
    machine.host.load(0, ids(3), ids(5))
    assert streams.num_done > 0
    streams.compute.mark().wait()
    assert machine.kv[0][0, 0, 0, 5, 0, 0] == 1.0


def test_failed_move_raises_when_its_block_is_read() -> None:
    streams = LateStreams()
    machine = Machine(0, streams)

    class Broken:
        def is_done(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("the device is gone")

    streams.run_task = lambda task: Broken()  # type: ignore[method-assign]
    machine.host.swap_out(0, ids(1), ids(3))
    with pytest.raises(RuntimeError, match="the device is gone"):
        machine.host.read(0, 3)


def test_slots_are_allocated_once_and_only_if_blocks_move() -> None:
    streams = LateStreams()
    machine = Machine(0, streams)
    machine.host.write(0, 1, bytes(machine.host.block_bytes(0)))
    assert streams.num_buffers == 0
    for _ in range(5):
        machine.host.swap_out(0, ids(1, 2, 3), ids(3, 4, 5))
        machine.host.free_mirrors()
    assert streams.num_buffers == SLOTS["num_slots"]
    assert not any(machine.host.read(0, 3))


@pytest.mark.parametrize(("part_bytes", "wanted"), [(1000, 4), (128, 4), (64, 4), (40, 2), (1, 2)])
def test_larger_blocks_have_fewer_slots(part_bytes: int, wanted: int) -> None:
    """This limits their memory; at least two remain. A block has 64 bytes."""
    streams, kv = LateStreams(), torch.zeros(SHAPES[0])
    kv[:, :, :, 2] = 5.0
    host = HostBlocks([kv], dim=3, streams=streams, part_bytes=part_bytes, num_slots=4)
    host.swap_out(0, ids(1, 2, 3), ids(3, 4, 5))
    assert host.block_bytes(0) == 64 and streams.num_buffers == wanted
    values = np.frombuffer(host.read(0, 4), np.float32)
    assert (values == 5.0).all() and not any(host.read(0, 5))


def test_last_writes_returns_the_last_write_to_each_block() -> None:
    assert last_writes(ids(3, 1, 3, 2, 1)).tolist() == [2, 3, 4]
    assert last_writes(ids(5, 2, 7)).tolist() == [0, 1, 2]
    assert last_writes(ids()).tolist() == []
