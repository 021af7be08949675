"""How much of its prompt a sequence may take from a cache."""

import pytest

from tests.scheduler.test_miss_report import TEXT, add, scheduler_of


def test_a_scored_prompt_may_read_only_scored_tokens_from_the_cache() -> None:
    """It may read all known tokens once every position but the first is scored."""
    scheduler = scheduler_of()
    add(scheduler, "r", TEXT[:10], 0.0, prompt_logprobs=1)
    sequence = scheduler.lifecycle.sequences["r"]
    assert sequence.num_readable_tokens == 0
    sequence.num_preemptions = 1
    found = []
    for sequence.num_prompt_logprobs in (0, 5, 8, 9, 10):
        found.append(sequence.num_readable_tokens)
    assert found == [0, 5, 8, 10, 10]


@pytest.mark.parametrize("grammar", ["", "a grammar"])
def test_the_mask_applies_to_the_candidates_of_a_beam_search(grammar: str) -> None:
    """It does not apply to the log-probabilities that a user requests."""
    scheduler = scheduler_of()
    add(scheduler, "r", TEXT[:10], 0.0, use_beam_search=True, n=2, grammar=grammar)
    group = scheduler.lifecycle.sequences["r"].group
    assert group is not None and group.row_params is not None
    assert group.row_params.use_beam_search == bool(grammar)
