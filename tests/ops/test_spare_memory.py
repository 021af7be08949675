"""Memory of large results is reused, but never while anything refers to it."""

import threading

import numpy as np
import pytest
import torch

from quire.ops.host.native import core
from quire.ops.host.spare_memory import LARGE, SpareMemory
from quire.ops.linear import linear
from quire.ops.weights.pack import pack

SIZE = LARGE + 1000


def test_memory_is_reused_when_nothing_refers_to_it() -> None:
    spare = SpareMemory()
    one, two = spare.empty(SIZE), spare.empty(SIZE)
    addresses = one.ctypes.data, two.ctypes.data
    assert len(set(addresses)) == 2 and not any(address % 64 for address in addresses)
    part = one[-3:]
    del one
    assert spare.empty(SIZE).ctypes.data not in addresses
    del part
    assert spare.empty(LARGE).ctypes.data == addresses[0]
    tensor = torch.from_numpy(two).view(torch.int32)
    del two
    last = tensor[-1:]
    del tensor
    assert spare.empty(SIZE).ctypes.data != addresses[1]
    assert last.numel() == 1


def test_spare_memory_that_is_too_small_is_freed() -> None:
    spare = SpareMemory()
    small, in_use = spare.empty(LARGE), spare.empty(LARGE)
    address = in_use.ctypes.data
    del small
    large = spare.empty(4 * LARGE)
    del in_use, large
    assert spare.empty(LARGE).ctypes.data == address  # memory in use at that time was not freed
    assert len(spare.empty(100)) == 100


def test_threads_do_not_share_memory() -> None:
    spare, barrier, wrong = SpareMemory(), threading.Barrier(4), []

    def use(number: int) -> None:
        for _ in range(50):
            barrier.wait()
            memory = spare.empty(LARGE)
            memory[:: LARGE // 64] = number
            barrier.wait()
            if not (memory[:: LARGE // 64] == number).all():
                wrong.append(number)
            del memory

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_large_products_in_use_are_not_overwritten() -> None:
    weight = pack(torch.eye(8).repeat(1 << 16, 1), None)
    results = [linear(torch.full((9, 8), float(i)), weight) for i in range(3)]
    assert results[0].nbytes > LARGE
    del results[1]
    results.append(linear(torch.full((9, 8), 3.0), weight))
    for result, value in zip(results, (0, 2, 3), strict=True):
        assert np.unique(result.numpy()).tolist() == [value]
