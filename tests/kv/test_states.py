"""Which of the two states of a turn is evicted first: by the hits of earlier turns."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.kv.states import ENOUGH, FAR_MORE, StateStatistics


@pytest.mark.parametrize(
    ("at_prompt", "at_answer", "has_ended", "expected"),
    [
        (ENOUGH, 0, True, [b"answer"]),
        (ENOUGH, 0, False, []),  # the answer continues
        (ENOUGH - 1, 0, True, []),  # too few hits to decide
        (2 * FAR_MORE, 2, True, [b"answer"]),
        (2 * FAR_MORE - 1, 2, True, []),
        (0, ENOUGH, False, [b"prompt"]),
        (0, ENOUGH - 1, True, []),
    ],
)
def test_the_kind_of_state_that_is_rarely_hit_is_evicted_first(
    at_prompt: int, at_answer: int, has_ended: bool, expected: list[bytes]
) -> None:
    statistics, evicted = StateStatistics(), list[bytes]()
    statistics.num_begun = [at_prompt, at_answer, 0]
    table: Any = SimpleNamespace(passing=(3, b"answer"), prompt_name=b"prompt", began=None)
    pool: Any = SimpleNamespace(evict_soon=evicted.append)
    statistics.settle(table, pool, has_ended)
    assert evicted == expected
