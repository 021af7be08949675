"""The way of token masks to a GPU: slots of pinned memory, and one place on the device, so that
recorded steps find them.

    a slot, and the memory on the device     [ places R | words M x W ...     room for R x W ]

Places beyond the step's masks are -1. Shape legend: R rows, M masks of a step, W words.
"""

import torch

from quire.ops.mask import RowMasks, num_words
from quire.runner.device import Arrival, Device
from quire.runner.gpu.slots import Int32, Ring
from quire.runner.step_ops import Update

NUM_SLOTS = 2  # masks of a step need the tokens of the one before


class MaskSlots:
    """Two slots and the memory on the device: each 5 MB for 256 rows of 151,936 tokens. Slots are
    made when the first masks come; a step may be recorded before, and reads only the memory."""

    def __init__(self, device: Device, max_rows: int, vocab_size: int) -> None:
        self._num_rows, self._num_words = max_rows, num_words(vocab_size)
        self._device = device
        self._ring: Ring | None = None
        self._total = max_rows * (1 + self._num_words)
        self._here = torch.full((self._total,), -1, dtype=torch.int32, device=device.device)

    def of(self, num_places: int) -> RowMasks:
        """Return where the masks of a step with so many places for sampling rows stand."""
        words_RW = self._here[self._num_rows :].view(self._num_rows, self._num_words)
        return RowMasks(self._here[:num_places], words_RW[:num_places])

    def prepare(self, places: Int32, words: Int32) -> Update:
        """Write masks into a slot. words: [M, any number]; those that are missing forbid."""
        if self._ring is None:
            self._ring = Ring(self._device, self._total, NUM_SLOTS)
        slot, count = self._ring.take(), len(places)
        end = self._num_rows + count * self._num_words
        slot.array[:count], slot.array[count : self._num_rows] = places, -1
        table = slot.array[self._num_rows : end].reshape(count, self._num_words)
        width = min(words.shape[1], self._num_words)
        table[:, :width], table[:, width:] = words[:, :width], 0

        def take() -> None:
            self._here[:end].copy_(slot.words[:end], non_blocking=True)

        def hold(arrival: Arrival) -> None:
            slot.used = arrival

        return Update(take, hold)
