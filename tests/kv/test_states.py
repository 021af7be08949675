"""Which of two states that a turn leaves goes first: by what turns began with so far."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.kv.states import ENOUGH, FAR_MORE, StateStatistics


@pytest.mark.parametrize(
    ("at_prompt", "at_answer", "has_ended", "goes"),
    [
        (ENOUGH, 0, True, [b"answer"]),
        (ENOUGH, 0, False, []),  # the answer goes on
        (ENOUGH - 1, 0, True, []),  # too few to tell
        (2 * FAR_MORE, 2, True, [b"answer"]),
        (2 * FAR_MORE - 1, 2, True, []),
        (0, ENOUGH, False, [b"prompt"]),
        (0, ENOUGH - 1, True, []),
    ],
)
def test_the_kind_that_is_hardly_ever_of_use_goes_first(
    at_prompt: int, at_answer: int, has_ended: bool, goes: list[bytes]
) -> None:
    statistics, gone = StateStatistics(), list[bytes]()
    statistics.num_begun = [at_prompt, at_answer, 0]
    table: Any = SimpleNamespace(passing=(3, b"answer"), prompt_name=b"prompt", began=None)
    pool: Any = SimpleNamespace(evict_soon=gone.append)
    statistics.settle(table, pool, has_ended)
    assert gone == goes
