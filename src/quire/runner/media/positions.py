"""The three positions of tokens with M-RoPE, as differences from the indices of the tokens.

A row's KV slots, masks and lengths use the index of a token. Only the rotation uses positions:

    index      0 ... first item ... last item | end ...
    offset     0     one for each axis        | delta, the same in all axes and for all tokens

So an offset depends only on the items before a token. The same prompt has the same positions,
however it was cut into chunks, and even if some of its tokens were generated before.

Shape legend: M tokens up to the end of a row's last item, T tokens of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from quire.base.plan import Plan
from quire.base.requests.media_items import MediaItem
from quire.models.vision.positions import frame_interval, mrope_positions
from quire.runner.media.spans import RowItems
from quire.spec.config_fields import Fields

NUM_AXES = 3
DEFAULT_MERGE_SIZE = 2  # of all families
# Families whose positions of frames follow the time in the video, with transformers' default.
TIMED_FAMILIES = {"qwen2_5_vl": 4.0}

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PositionRule:
    """Rule for the positions of a model's items, apart from their grids.

    merge_size: patches on each side of the group that one token stands for. tokens_per_second: of
    videos; None where frames count by one.
    """

    merge_size: int
    tokens_per_second: float | None = None

    @classmethod
    def from_config(cls, raw: dict[str, Any]) -> Self:
        """Return the rule of a model. raw: the contents of its `config.json`."""
        inner = raw.get("vision_config")
        fields = Fields(inner if isinstance(inner, dict) else {}, "config.json: vision_config", {})
        default = TIMED_FAMILIES.get(str(raw.get("model_type")))
        per_second = None if default is None else fields.number("tokens_per_second", default)
        return cls(fields.integer("spatial_merge_size", default=DEFAULT_MERGE_SIZE), per_second)

    def offsets(self, items: Sequence[MediaItem]) -> "Offsets":
        """Return the offsets of a row with these items, at least one."""
        images = [(item.start, _grid(item)) for item in items]
        end = items[-1].end
        positions, _ = mrope_positions(end + 1, images, self.merge_size, self._intervals(items))
        found_3M = positions - np.arange(end + 1)
        return Offsets(found_3M[:, :end], int(found_3M[0, end]))

    def _intervals(self, items: Sequence[MediaItem]) -> list[float]:
        rate = self.tokens_per_second
        return [
            1.0 if rate is None or not seconds else frame_interval(rate, seconds)
            for seconds in (item.seconds_per_grid for item in items)
        ]


@dataclass(frozen=True)
class Offsets:
    """Offsets of a row: of_items, int64 [3, M], up to the end of its last item; delta after."""

    of_items: Int64
    delta: int

    def part(self, first: int, last: int) -> Int64:
        """Return the offsets of the tokens first..last-1, [3, last - first]."""
        found = np.full((NUM_AXES, last - first), self.delta, np.int64)
        own = self.of_items[:, first:last]
        found[:, : own.shape[1]] = own
        return found


class RowOffsets(RowItems[Offsets]):
    """Offsets of the rows that have items."""

    def __init__(self, rule: PositionRule) -> None:
        super().__init__()
        self._rule = rule

    def data_of(self, items: tuple[MediaItem, ...]) -> Offsets:
        """See RowItems."""
        return self._rule.offsets(items)

    def of_step(self, plan: Plan) -> Int64 | None:
        """Return the offsets of a step's tokens, [3, T]; None if they are 0.

        `computed_bound` is exact up to the end of the prompt. After it a row may have fewer tokens,
        but it has all its items, so its offsets are the delta.
        """
        if not self.are_in(plan):
            return None
        found = np.zeros((NUM_AXES, plan.num_scheduled_tokens), np.int64)
        begin = 0
        for row, num, first in zip(
            plan.rows.tolist(), plan.num_tokens.tolist(), plan.computed_bound.tolist(), strict=True
        ):
            if row in self._rows:
                found[:, begin : begin + num] = self._rows[row].part(first, first + num)
            begin += num
        return found


def _grid(item: MediaItem) -> tuple[int, int, int]:
    frames, rows, columns = item.grid
    return frames, rows, columns
