"""Which of several hits a sequence begins with (`scheduler/prefix_lookup.py`)."""

from typing import Any

import pytest

from quire.kv.manager import KVBlocks
from tests.scheduler.device import make_request
from tests.scheduler.test_step_results import scheduler_of


@pytest.mark.parametrize(
    ("held", "named", "found"), [(None, 8, 8), (4, 8, 8), (8, 8, 8), (12, 8, 12), (19, 0, 19)]
)
def test_the_longer_of_what_is_held_and_what_is_named(
    held: int | None, named: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 tokens; the last one is always computed."""
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(20))), 0.0)
    sequence, memory = scheduler.lifecycle.sequences["r"], scheduler.memory
    hits: dict[int | None, Any] = {None: None} | {num: KVBlocks(num, ()) for num in (4, 8, 12, 19)}
    monkeypatch.setattr(memory.held, "hit", lambda _: hits[held])
    by_name = KVBlocks(named, ())
    monkeypatch.setattr(memory._lookup, "_find_named", lambda *_: by_name)
    hit = memory.find_hit(sequence)
    assert hit.num_tokens == found
    assert (hit is by_name) == (held is None or held < named)
