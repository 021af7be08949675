"""Transfer of plans and token masks to the device: rings of slots in pinned memory.

A plan's changes are cut into chunks, each of which fills a slot. A kernel reads the changes from
there (`ops/kernels/row_deltas.py`). A slot is not written again before the kernel has read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.kernels.row_deltas import MAX_RUN_TOKENS, SlotLayout
from quire.ops.kernels.step_inputs import HEADER
from quire.ops.sampling.logit_edits import RowMasks, num_words
from quire.runner.device import Arrival, Device
from quire.runner.step_ops import RowUpdates, Update, merged

Int32 = npt.NDArray[np.int32]

NUM_SLOTS = 8
NUM_MASK_SLOTS = 2  # masks of a step need the tokens of the previous step
MAX_DELTAS = 8192
MAX_RUNS = 512
MAX_TOKENS = 32768


@dataclass
class Slot:
    """Pinned memory, as a tensor (words) and for numpy (array). used: device work that reads it."""

    words: torch.Tensor
    array: Int32
    used: Arrival | None = None

    @cached_property
    def address(self) -> int:
        return self.words.data_ptr()


@dataclass(frozen=True)
class SlotContents:
    """A filled slot and the numbers of its deltas and runs."""

    slot: Slot
    num_deltas: int
    num_runs: int


@dataclass
class Chunk:
    """Contents of one slot. Its runs are written in parallel, so no two may overlap."""

    deltas: Int32 = field(default_factory=lambda: np.empty((0, 4), np.int32))
    runs: list[tuple[int, int, Int32]] = field(default_factory=list)
    num_tokens: int = 0
    spans: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # of runs, by row

    def has_room_for(self, row: int, start: int, length: int) -> bool:
        """Return whether the chunk has room for a run that overlaps no other."""
        if self.num_tokens + length > MAX_TOKENS or len(self.runs) == MAX_RUNS:
            return False
        end = start + length
        return all(end <= first or last <= start for first, last in self.spans.get(row, ()))

    def add(self, row: int, start: int, tokens: Int32) -> None:
        self.runs.append((row, start, tokens))
        self.num_tokens += len(tokens)
        self.spans.setdefault(row, []).append((start, start + len(tokens)))


class Ring:
    """Slots of pinned memory, used in rotation."""

    def __init__(self, device: Device, num_words: int, num_slots: int) -> None:
        words = [device.pinned(num_words) for _ in range(num_slots)]
        self._slots = [Slot(memory, memory.numpy()) for memory in words]
        self._next = 0

    @property
    def first(self) -> Slot:
        """Return a slot as an example of all."""
        return self._slots[0]

    def take(self) -> Slot:
        """Return the next slot, after waiting until the device has read its contents."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.used is not None:
            slot.used.wait()
            slot.used = None
        return slot


class SlotRing(Ring):
    """Ring of slots for plans' changes."""

    def __init__(self, device: Device, max_rows: int, *, num_slots: int = NUM_SLOTS) -> None:
        self.layout = SlotLayout(max_rows, MAX_DELTAS, MAX_RUNS, MAX_TOKENS)
        super().__init__(device, self.layout.num_words, num_slots)

    def cut(self, updates: RowUpdates) -> list[Chunk]:
        """Cut changes into chunks that each fit one slot; at least one chunk. A chunk's deltas are
        not merged yet."""
        chunks, deltas = [Chunk()], updates.all_deltas()
        for row, position, tokens in updates.runs:
            for start in range(0, len(tokens), MAX_RUN_TOKENS):
                piece = tokens[start : start + MAX_RUN_TOKENS]
                if not chunks[-1].has_room_for(row, position + start, len(piece)):
                    chunks.append(Chunk())
                chunks[-1].add(row, position + start, piece)
        for i, start in enumerate(range(0, len(deltas), MAX_DELTAS)):
            if i == len(chunks):
                chunks.append(Chunk())
            chunks[i].deltas = deltas[start : start + MAX_DELTAS]
        return chunks

    def fill(self, slot: Slot, chunk: Chunk) -> SlotContents:
        """Write a chunk's deltas and runs into a slot."""
        deltas, at = merged(chunk.deltas), self.layout.deltas_at
        slot.array[at : at + deltas.size] = deltas.ravel()
        self.write_runs(slot, chunk)
        return SlotContents(slot, len(deltas), len(chunk.runs))

    def write_runs(self, slot: Slot, chunk: Chunk) -> None:
        """Write a chunk's runs into a slot."""
        layout, array = self.layout, slot.array
        at, used = layout.runs_at, 0
        for row, position, tokens in chunk.runs:
            array[at : at + 4] = row, position, used, len(tokens)
            start = layout.tokens_at + used
            array[start : start + len(tokens)] = tokens
            at, used = at + 4, used + len(tokens)

    def write_lists(self, slot: Slot, header: Sequence[int], lists: Sequence[Int32]) -> None:
        """Write the inbox: the header's words and the lists, each in its own region."""
        array, max_rows = slot.array, self.layout.max_rows
        array[: len(header)] = header
        at = HEADER
        for values, width in zip(lists, (1, 1, 2), strict=True):
            array[at : at + values.size] = values.ravel()
            at += width * max_rows


class MaskSlots:
    """Two pinned slots for masks, allocated at the first masks, and their memory on the device.
    Each has 5 MB for 256 rows of 151,936 tokens. Recorded steps read only the device memory."""

    def __init__(self, device: Device, max_rows: int, vocab_size: int) -> None:
        self._num_rows, self._num_words = max_rows, num_words(vocab_size)
        self._device = device
        self._ring: Ring | None = None
        self._total = max_rows * (1 + self._num_words)
        self._here = torch.full((self._total,), -1, dtype=torch.int32, device=device.device)

    def of(self, num_row_slots: int) -> RowMasks:
        """Return the masks of a step with num_places sampling rows: places [num_places], words."""
        words_RW = self._here[self._num_rows :].view(self._num_rows, self._num_words)
        return RowMasks(self._here[:num_row_slots], words_RW[:num_row_slots])

    def prepare(self, spans: Int32, words: Int32) -> Update:
        """Write masks into a slot. spans: [M]; words: [M, any number], missing words forbid."""
        if self._ring is None:
            self._ring = Ring(self._device, self._total, NUM_MASK_SLOTS)
        slot, count = self._ring.take(), len(spans)
        end = self._num_rows + count * self._num_words
        slot.array[:count], slot.array[count : self._num_rows] = spans, -1
        table = slot.array[self._num_rows : end].reshape(count, self._num_words)
        width = min(words.shape[1], self._num_words)
        table[:, :width], table[:, width:] = words[:, :width], 0

        def take() -> None:
            self._here[:end].copy_(slot.words[:end], non_blocking=True)

        def hold(arrival: Arrival) -> None:
            slot.used = arrival

        return Update(take, hold)
