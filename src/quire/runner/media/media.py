"""Media of a runner: track the rows' items, encode them, and make the model's inputs.

Shape legend: T tokens of the step, M tokens that read slots, W width of a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import EngineError
from quire.base.plan import Plan
from quire.base.requests.media_items import EncoderInput, MediaItem
from quire.models.model import Model
from quire.models.vision.tower import VisionTower
from quire.ops.attention_inputs import AttentionStep, Int32
from quire.ops.host.host_memory import to_device
from quire.runner.attachment import ForwardPart
from quire.runner.media.positions import NUM_AXES, PositionRule, RowOffsets
from quire.runner.media.spans import RowSpans
from quire.spec.model_spec import read_config

Int64 = npt.NDArray[np.int64]

NUM_CHANNELS = 3
NUM_VALUES = 256  # of a pixel in uint8


@dataclass(frozen=True)
class ItemArrays:
    """Arrays of an item as the vision tower reads them; see ImageArrays."""

    pixels: npt.NDArray[np.uint8]
    table: npt.NDArray[np.float32]
    grid: tuple[int, ...]

    @classmethod
    def of(cls, item: MediaItem) -> "ItemArrays":
        """Return views of the bytes of an item."""
        table = np.frombuffer(item.table, np.float32).reshape(NUM_CHANNELS, NUM_VALUES)
        return cls(np.frombuffer(item.pixels, np.uint8).reshape(item.shape), table, item.grid)


class Encoder:
    """Vision tower and the memory of its outputs, [slots, W].

    Its methods run on the device's side, in the order of its work. An item that cannot be encoded
    fails the steps that read its slots, and no other step.
    """

    def __init__(self, tower: VisionTower, memory: torch.Tensor) -> None:
        self._tower, self._memory = tower, memory
        self._failed: dict[int, Exception] = {}  # by slot

    def encode(self, inputs: Sequence[EncoderInput]) -> None:
        """Encode items into their slots. Encoding an item again writes the same numbers."""
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


def _no_ints() -> Int64:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class StepMedia(ForwardPart):
    """Media of one step; turns the step's inputs into the model's inputs.

    encoder: None where nothing is encoded. num_axes: positions of a token, 1 or 3.
    items: items to encode. indices, slots: indices of the step's tokens that read encoder outputs,
    and the slots that they read, [M]. offsets: positions minus indices, [3, T]; None if they are 0.
    ends: see AttentionStep.
    """

    encoder: Encoder | None = None
    num_axes: int = 1
    items: tuple[EncoderInput, ...] = ()
    indices: Int64 = field(default_factory=_no_ints)
    slots: Int64 = field(default_factory=_no_ints)
    offsets: Int64 | None = None
    ends: Int32 | None = None

    @property
    def can_be_recorded(self) -> bool:
        """Return whether the model's inputs depend only on the step's inputs."""
        return len(self.indices) == 0 and self.offsets is None and self.ends is None

    def attention(self, step: AttentionStep) -> AttentionStep:
        """Return the step with the end of each token's visible keys, int32 [T]."""
        return step if self.ends is None else replace(step, ends_T=self.ends)

    def before(self) -> None:
        """Encode the step's items, before its forward pass."""
        if self.encoder is not None:
            self.encoder.encode(self.items)

    def inputs(
        self, ids_T: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids, int64 [T], and positions, int64 [T] or [3, T].

        An id below 0 stands for slot -1 - id. Raises EngineError for a slot that holds nothing.
        """
        return self._ids(ids_T), self.positions(positions_T)

    def _ids(self, ids_T: torch.Tensor) -> torch.Tensor:
        if len(self.indices) == 0:
            return ids_T
        assert self.encoder is not None, "reads come with an encoder"
        self.encoder.check(self.slots)
        places_M, ids_M = (
            to_device(each, ids_T.device) for each in (self.indices, -1 - self.slots)
        )
        return ids_T.index_copy(0, places_M, ids_M)

    def positions(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the positions of tokens with these indices, [T] or [3, T]."""
        if self.num_axes == 1:
            return positions_T
        if self.offsets is None:
            return positions_T.repeat(self.num_axes, 1)
        return positions_T + to_device(self.offsets, positions_T.device)


def reads_of(plan: Plan) -> tuple[Int64, Int64]:
    """Return the step's tokens that read slots, and their slots, [M] each.

    Reads of rows outside the plan are skipped: a part of a plan carries all reads of the whole.
    """
    begins = (np.cumsum(plan.num_tokens) - plan.num_tokens - plan.computed_bound).tolist()
    begin_of = dict(zip(plan.rows.tolist(), begins, strict=True))
    reads = [read for read in plan.encoder_reads if read.row in begin_of]
    if not reads:
        return _no_ints(), _no_ints()
    indices = [begin_of[read.row] + read.position + np.arange(len(read.slots)) for read in reads]
    slots = [read.slots.astype(np.int64) for read in reads]
    return np.concatenate(indices).astype(np.int64), np.concatenate(slots)


class Media:
    """Media of a runner's rows, an `Attachment` of its forward pass.

    encoder: None if the model has no vision tower, or an earlier stage encodes. rule: of a model
    with three positions for each token; None: positions are token indices.
    """

    def __init__(self, encoder: Encoder | None = None, rule: PositionRule | None = None) -> None:
        self._encoder = encoder
        self._offsets = None if rule is None else RowOffsets(rule)
        self._spans = RowSpans()
        self.at_rest = StepMedia(num_axes=1 if rule is None else NUM_AXES)

    def prepare(self, plan: Plan) -> StepMedia:
        """Note which rows a plan starts, forks and releases; return the media of its step."""
        offsets = None
        self._spans.follow(plan)
        ends = self._spans.of_step(plan)
        if self._offsets is not None:
            self._offsets.follow(plan)
            offsets = self._offsets.of_step(plan)
        if offsets is None and ends is None and not (plan.encoder_inputs or plan.encoder_reads):
            return self.at_rest
        if self._encoder is None:
            return StepMedia(num_axes=self.at_rest.num_axes, offsets=offsets, ends=ends)
        return StepMedia(
            self._encoder,
            self.at_rest.num_axes,
            plan.encoder_inputs,
            *reads_of(plan),
            offsets=offsets,
            ends=ends,
        )


def make_media(model: Any, directory: Path) -> Media | None:
    """Return the media attachment of a runner; None for a model that reads only text. model:
    loaded, with its encoder memory; a model of another package reads only text. directory: of the
    model. Raises ModelError for a faulty config."""
    if not isinstance(model, Model) or (model.vision is None and model.position_axes == 1):
        return None
    rule = None if model.position_axes == 1 else PositionRule.from_config(read_config(directory))
    if model.vision is None or model.encoder_memory is None:
        return Media(rule=rule)
    return Media(Encoder(model.vision, model.encoder_memory), rule)
