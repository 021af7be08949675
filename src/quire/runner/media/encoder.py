"""Encodes media items: runs the vision tower and keeps its outputs in the slots of the model.

Shape legend: W width of a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import EngineError
from quire.base.media.item import EncoderInput, MediaItem
from quire.models.vision.tower import VisionTower
from quire.ops.host_memory import to_device

NUM_CHANNELS = 3
NUM_VALUES = 256  # of a pixel in uint8

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemArrays:
    """An item as the vision tower reads it; see ImageArrays."""

    pixels: npt.NDArray[np.uint8]
    table: npt.NDArray[np.float32]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, item: MediaItem) -> "ItemArrays":
        """Return views of the bytes of an item."""
        table = np.frombuffer(item.table, np.float32).reshape(NUM_CHANNELS, NUM_VALUES)
        return cls(np.frombuffer(item.pixels, np.uint8).reshape(item.shape), table, item.grid)


class Encoder:
    """A vision tower and the memory of its outputs, [slots, W].

    Everything here runs on the device's side, in the order of its work. An item that cannot be
    encoded fails the steps that read its slots, and no other step.
    """

    def __init__(self, tower: VisionTower, memory: torch.Tensor) -> None:
        self._tower, self._memory = tower, memory
        self._failed: dict[int, Exception] = {}  # by slot

    def encode(self, inputs: Sequence[EncoderInput]) -> None:
        """Encode items into their slots. A second time it writes the same numbers."""
        for each in inputs:
            slots = each.slots.tolist()
            try:
                self._store(each)
            except Exception as error:
                self._failed |= dict.fromkeys(slots, error)
                continue
            for slot in slots if self._failed else ():
                self._failed.pop(slot, None)

    def check(self, slots: Int64) -> None:
        """Raise EngineError if an item could not be encoded into one of these slots."""
        if not self._failed:
            return
        error = next((self._failed[slot] for slot in slots.tolist() if slot in self._failed), None)
        if error is not None:
            raise EngineError(f"a media item could not be encoded: {error}") from error

    def _store(self, each: EncoderInput) -> None:
        outputs_TW = self._tower.encode(ItemArrays.of(each.item))
        if len(outputs_TW) != len(each.slots):
            raise EngineError(
                f"the vision tower returned {len(outputs_TW)} rows for an item of"
                f" {len(each.slots)} tokens; its grid is {each.item.grid}"
            )
        slots = to_device(each.slots.astype(np.int64), self._memory.device)
        self._memory.index_copy_(0, slots, outputs_TW.to(self._memory.dtype))
