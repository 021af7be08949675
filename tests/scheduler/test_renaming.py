"""A reset's effect on the names of a request's blocks (`scheduler/core/names.py`)."""

import pytest

from quire.scheduler.core.names import rename
from tests.scheduler.test_step_results import scheduler_of, step
from tests.support.scheduler.fake_device import make_request


@pytest.mark.parametrize("caching", [True, False])
def test_a_sequence_without_blocks_is_renamed_like_a_new_one(caching: bool) -> None:
    """It also looks up its prompt again."""
    scheduler = scheduler_of(caching)
    scheduler.add(make_request("r", list(range(9))), 0.0)
    sequence, names = scheduler.lifecycle.sequences["r"], scheduler.memory.names
    sequence.prefix_digests[4], sequence.found_at = b"old", 7
    rename(sequence, names, "epoch")
    assert sequence.root == names.root(sequence.request, 1, sequence.arrival)
    assert (sequence.digests, sequence.prefix_digests, sequence.found_at) == ([], {}, -1)
    assert not sequence.is_renamed


def test_a_sequence_with_blocks_gets_its_own_root() -> None:
    scheduler = scheduler_of()
    scheduler.add(make_request("r", list(range(9))), 0.0)
    step(scheduler, 5)
    sequence, names = scheduler.lifecycle.sequences["r"], scheduler.memory.names
    before = sequence.root
    rename(sequence, names, "epoch")
    assert sequence.is_renamed and sequence.digests == []
    assert sequence.root not in (before, names.root(sequence.request, 1, sequence.arrival))
