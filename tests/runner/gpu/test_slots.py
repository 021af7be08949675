"""The ring of slots through which changes cross to a GPU."""

import numpy as np
import torch

from quire.runner.gpu.slots import SlotRing
from quire.runner.step_ops import RowUpdates
from tests.support.runner.late_device import LateDevice


def test_slot_is_reused_only_after_it_was_read() -> None:
    device = LateDevice(torch.device("cpu"))
    ring = SlotRing(device, 4, num_slots=2)
    seen: list[int] = []
    for number in range(5):
        slot = ring.take()
        slot.array[0] = number
        slot.used = device.run(lambda slot=slot: [seen.append(int(slot.array[0]))][1:])
    device.run(list).wait()
    assert seen == [0, 1, 2, 3, 4]


def test_overlapping_runs_are_written_in_separate_chunks() -> None:
    ring = SlotRing(LateDevice(torch.device("cpu")), 4)
    texts = [np.arange(n, dtype=np.int32) for n in (5, 2, 3)]
    updates = RowUpdates(runs=[(1, 0, texts[0]), (1, 3, texts[1]), (2, 3, texts[2])])
    chunks = [[run[:2] for run in chunk.runs] for chunk in ring.cut(updates)]
    assert chunks == [[(1, 0)], [(1, 3), (2, 3)]]
