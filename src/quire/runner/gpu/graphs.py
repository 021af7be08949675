"""Recorded steps of one token a row: one launch in place of hundreds (T 4.6, fig. 4.6).

A ladder of sizes; a step takes the next size that has room for its rows. The first step of its kind
(a size and what its sampling needs) is launched as it is; the second is recorded, so nobody waits
at the start. The largest size is recorded first, and all others find room in its memory. In idle
moments (`record_next`) what an earlier run used comes first, then the ladder from the top.

Recording fails if the device's memory is full; then nothing more is recorded, and steps that are
not run as they are.
"""

import logging
from dataclasses import dataclass, field
from typing import Protocol

import torch

from quire.ops.attention.base import AttentionBackend, AttentionStep
from quire.ops.kernels.step_inputs import StepBuffers
from quire.runner.gpu.device import Device
from quire.runner.gpu.pieces import Pieces, record
from quire.runner.gpu.sampler import Needs
from quire.runner.gpu.shape import Shape
from quire.runner.gpu.used_sizes import Kind, UsedSizes

logger = logging.getLogger("quire")

FIRST_TIMES = 1  # steps of a kind that are launched as they are


def ladder(max_rows: int) -> list[int]:
    """Sizes up to max_rows, none of which has more than 16 rows too many, or twice as many."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_rows + 16, 16)]
    return [size for size in sizes if size < max_rows] + [max_rows]


class Decoder(Protocol):
    """What is recorded (`GpuRunner`)."""

    backend: AttentionBackend

    def decode_shape(self, size: int) -> Shape: ...

    def buffers(self, shape: Shape) -> StepBuffers: ...

    def attention_step(self, buffers: StepBuffers, shape: Shape) -> AttentionStep: ...

    def decode(
        self, buffers: StepBuffers, shape: Shape, needs: Needs, backend: AttentionBackend
    ) -> list[torch.Tensor]: ...

    def expect_nothing(self) -> None:
        """A step without rows comes next."""
        ...


@dataclass
class Recorded:
    """A step of `size` rows; what the device has made of it is there once it was recorded."""

    decoder: Decoder
    size: int
    in_pieces: bool
    buffers: StepBuffers | None = None
    pieces: Pieces = field(default_factory=Pieces)

    def replay(self, shape: Shape) -> list[torch.Tensor]:
        """Carry it out for a step of this shape, which has as many places; returns copies of what
        rows wanted: the next replay writes over it."""
        assert self.buffers is not None, "it is recorded first"
        if self.in_pieces:
            self.decoder.backend.prepare(self.decoder.attention_step(self.buffers, shape))
        self.pieces.replay()
        return [tensor.clone() for tensor in self.pieces.outputs]


class Graphs:
    """in_pieces: attention is left out of the graphs. used: what to remember for the next start."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        max_rows: int,
        *,
        in_pieces: bool = False,
        used: UsedSizes | None = None,
    ) -> None:
        self.sizes = ladder(max_rows)
        self._device, self._decoder, self._in_pieces = device, decoder, in_pieces
        self._used = used
        self._recorded: dict[tuple[int, Needs], Recorded] = {}
        self._times: dict[tuple[int, Needs], int] = {}
        self._is_full = False
        self._expected = sorted(set() if used is None else set(used.read()), reverse=True)

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def find(self, num_rows: int, needs: Needs) -> Recorded | None:
        """The graph for a step of so many rows, perhaps recorded now; None if it is to be launched
        as it is. The inbox is not this step's yet."""
        if num_rows > self.sizes[-1] or not needs.can_be_recorded:
            return None
        key = next(size for size in self.sizes if size >= num_rows), needs
        if key in self._recorded:
            return self._recorded[key]
        self._times[key] = self._times.get(key, 0) + 1
        if self._times[key] <= FIRST_TIMES or self._is_full:
            return None
        if not self._recorded:
            self._try(self.sizes[-1], Needs())
        return self._try(*key)

    def record_next(self) -> bool:
        """Record one more, if there was an answer and one is left; whether it did."""
        if not self._times or self._is_full:
            return False
        while self._expected:
            size, filters, penalties, edits, num = self._expected.pop(0)
            needs = Needs(filters, penalties, 0 if edits else None, num)
            if size in self.sizes and (size, needs) not in self._recorded:
                return self._try(size, needs) is not None
        for size in reversed(self.sizes):
            if (size, Needs()) not in self._recorded:
                return self._try(size, Needs()) is not None
        return False

    def _try(self, size: int, needs: Needs) -> Recorded | None:
        if self._is_full:
            return None
        if (size, needs) in self._recorded:
            return self._recorded[size, needs]
        try:
            recorded = self._record(size, needs)
        except torch.OutOfMemoryError:
            self._is_full = True
            logger.warning(
                "no memory for a graph of %d rows: steps without one run slower; lower"
                " gpu_memory_utilization or max_num_seqs, or set enforce_eager.", size,
            )  # fmt: skip
            return None
        if needs.edits is not None:
            self._drop_edits_before(needs.edits)
        self._recorded[size, needs] = recorded
        if self._used is not None:
            self._used.write(_kind(size, needs) for size, needs in self._recorded)
        return recorded

    def _drop_edits_before(self, generation: int) -> None:
        """Graphs that read a table of edits which has moved are of no use any more."""
        for size, needs in list(self._recorded):
            if needs.edits is not None and needs.edits < generation:
                del self._recorded[size, needs]

    def _record(self, size: int, needs: Needs) -> Recorded:
        """Once as it is, for a step without rows, so that all is compiled; then recorded."""
        decoder = self._decoder
        shape, recorded = decoder.decode_shape(size), Recorded(decoder, size, self._in_pieces)
        decoder.expect_nothing()

        def work() -> list[torch.Tensor]:
            buffers = recorded.buffers = decoder.buffers(shape)

            def step(backend: AttentionBackend) -> list[torch.Tensor]:
                backend.prepare(decoder.attention_step(buffers, shape))
                return decoder.decode(buffers, shape, needs, backend)

            step(decoder.backend)
            in_pieces = self._in_pieces
            recorded.pieces = record(self._device, decoder.backend, step, in_pieces=in_pieces)
            return []

        self._device.run(work)
        return recorded


def _kind(size: int, needs: Needs) -> Kind:
    edits = needs.edits is not None
    return size, needs.has_filters, needs.has_penalties, edits, needs.num_candidates
