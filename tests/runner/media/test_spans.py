"""Which tokens of a step attend to each other in both directions, by the plans of its rows."""

import numpy as np
import pytest

from quire.base.plan import Plan, RowFork, RowStart
from quire.base.requests.media_items import MediaItem
from quire.base.requests.sampling_params import SamplingParams
from quire.runner.media.media import Media
from quire.runner.media.spans import RowSpans, key_ends
from tests.support.models.paged_forward import RowPart, make_step

ITEMS = (
    MediaItem(2, 3, b"a" * 32, is_whole=True),
    MediaItem(5, 2, b"b" * 32, is_whole=True),
    MediaItem(9, 4, b"c" * 32),
)
NONE, A, B = 0, 5, 7  # no end, and the ends of the first two items


def start(row: int, media: tuple[MediaItem, ...] = ITEMS) -> RowStart:
    return RowStart(row, np.arange(16, dtype=np.int32), 0, 16, SamplingParams(), 0, media=media)


def plan(rows: list[tuple[int, int, int]], **changes: object) -> Plan:
    """Make a plan whose rows are given as (row, computed, tokens)."""
    row, computed, tokens = np.array(rows, np.int32).reshape(-1, 3).T
    return Plan(0, row, tokens, computed, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (0, 8, [NONE, NONE, A, A, A, B, B, NONE]),
        (3, 7, [A, A, B, B]),
        (0, 2, [NONE, NONE]),
        (7, 8, [NONE]),
    ],
)
def test_each_token_of_a_whole_item_has_its_end(first: int, last: int, expected: list[int]) -> None:
    found = key_ends(ITEMS[:2], first, last)
    assert found.dtype == np.int32 and found.flags.c_contiguous
    assert found.tolist() == expected


def test_step_must_not_end_inside_a_whole_item() -> None:
    with pytest.raises(AssertionError, match="the rest of a whole item"):
        key_ends(ITEMS[:2], 0, 4)


def test_ends_follow_the_order_of_rows_in_the_step() -> None:
    rows = RowSpans()
    rows.follow(plan([], started=(start(3), start(4, ()))))
    found = rows.of_step(plan([(4, 8, 1), (3, 4, 4)]))
    assert found is not None
    assert found.tolist() == [NONE, A, B, B, NONE]
    assert rows.of_step(plan([(4, 9, 1), (3, 8, 1)])) is None


def test_items_that_are_not_whole_have_no_ends() -> None:
    rows = RowSpans()
    rows.follow(plan([], started=(start(3, ITEMS[2:]),)))
    assert rows.of_step(plan([(3, 0, 16)])) is None


def test_fork_inherits_items_until_it_is_released() -> None:
    rows = RowSpans()
    rows.follow(plan([], started=(start(1),)))
    rows.follow(plan([], forked=(RowFork(1, 2, 1),), released=np.array([], np.int32)))
    assert rows.of_step(plan([(2, 0, 16)])) is not None
    rows.follow(plan([], released=np.array([2], np.int32)))
    assert rows.of_step(plan([(2, 0, 16)])) is None


def test_attention_receives_the_ends_of_keys() -> None:
    media = Media()
    step = media.prepare(plan([(1, 0, 16)], started=(start(1),)))
    made = step.attention(make_step([RowPart(0, 16, ([0, 1, 2, 3],))], 4))
    assert made.ends_T is not None and made.ends_T.tolist()[:8] == [NONE, NONE, A, A, A, B, B, NONE]
    assert not step.can_be_recorded and media.prepare(plan([(1, 16, 1)])).can_be_recorded
