"""Offsets of rows: any part of a row that a step computes has the positions of the prompt."""

import numpy as np
import pytest

from quire.base.plan import Plan, RowFork, RowStart
from quire.base.requests.media_items import MediaItem
from quire.base.requests.sampling_params import SamplingParams
from quire.models.vision.positions import frame_interval, mrope_positions
from quire.runner.media.positions import PositionRule, RowOffsets

QWEN25 = {"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": 2}}


def item(start: int, grid: tuple[int, int, int], seconds: float = 0.0) -> MediaItem:
    frames, rows, columns = grid
    num = frames * rows * columns // 4
    return MediaItem(start, num, bytes(32), grid=grid, seconds_per_grid=seconds)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def start(row: int, *items: MediaItem) -> RowStart:
    return RowStart(row, ints(1), 0, 40, SamplingParams(), 0, media=items)


def plan(rows: dict[int, tuple[int, int]], **changes: object) -> Plan:
    """rows: the first token and the number of tokens of each row."""
    first, num = (ints(*(pair[i] for pair in rows.values())) for i in (0, 1))
    return Plan(0, rows=ints(*rows), num_tokens=num, computed_bound=first, **changes)  # type: ignore[arg-type]


def test_each_part_of_a_row_has_the_positions_of_the_prompt() -> None:
    items = item(3, (1, 4, 6)), item(9, (1, 2, 2)), item(15, (1, 8, 2))
    expected, delta = mrope_positions(40, [(each.start, each.grid) for each in items], 2)  # type: ignore[misc]
    offsets = PositionRule(2).offsets(items)
    for first in range(40):
        for last in range(first, 40):
            found = offsets.part(first, last) + np.arange(first, last)
            np.testing.assert_array_equal(found, expected[:, first:last])
    assert offsets.delta == delta
    assert offsets.part(100, 102).tolist() == [[delta] * 2] * 3, "an answer"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_video_frames_follow_time_in_qwen2_5_only(family: str) -> None:
    video = item(2, (3, 2, 2), seconds=1.5)
    raw = QWEN25 | {"model_type": family}
    interval = frame_interval(2, 1.5) if family == "qwen2_5_vl" else 1.0
    expected, _ = mrope_positions(8, [(2, (3, 2, 2))], 2, [interval])
    found = PositionRule.from_config(raw).offsets([video])
    np.testing.assert_array_equal(found.part(0, 8) + np.arange(8), expected)


def test_positions_after_a_long_video_continue_into_the_answer() -> None:
    """The next prompt contains the answer, which must keep its positions."""
    found = PositionRule(2, 4.0).offsets([item(2, (3, 2, 2), seconds=9.0)])
    positions = found.part(0, 90) + np.arange(90)
    assert positions[0, 2:5].tolist() == [2, 38, 74], "beyond the text after it"
    assert positions[:, 5:].tolist() == [list(range(3, 88))] * 3


def test_offsets_follow_started_forked_and_released_rows() -> None:
    rows = RowOffsets(PositionRule.from_config({}))
    first = plan({0: (0, 6), 1: (0, 2)}, started=(start(0, item(1, (1, 4, 2))), start(1)))
    for _ in range(2):  # a step may be repeated
        rows.follow(first)
        found = rows.of_step(first)
        assert found is not None
        assert found[:, 6:].tolist() == [[0, 0]] * 3, "text"
        assert found[:, :6].tolist() == [[0, 0, -1, 0, 0, 0], [0] * 6, [0, 0, -1, 0, 0, 0]]
    rows.follow(plan({}, forked=(RowFork(0, 2, 1), RowFork(1, 0, 1))))
    assert rows.of_step(plan({0: (9, 1), 1: (9, 1)})) is None
    found = rows.of_step(plan({1: (9, 1), 2: (2, 1)}))
    assert found is not None and found.tolist() == [[0, -1], [0, 0], [0, -1]]
    rows.follow(plan({}, released=ints(2)))
    assert rows.of_step(plan({2: (2, 1)})) is None
