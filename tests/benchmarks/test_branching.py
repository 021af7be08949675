"""Beam search and samples in a scheduler without a model."""

import pytest

from benchmarks.virtual.branching import BranchingExecutor, group_request
from benchmarks.virtual.dry_run import dry_run
from quire.base.settings.config import SchedulerConfig


@pytest.mark.parametrize("beams", [False, True])
def test_groups_share_blocks_and_run_to_their_ends(beams: bool) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    scheduler, executor = dry_run(200, 4, config, 64, enable_prefix_caching=False)
    branching = BranchingExecutor(executor, sureness=0.5)
    for i in range(3):
        scheduler.add(group_request(str(i), list(range(9)), 20, num=4, beams=beams), 0.0)
    saved, ended = [], []
    while (plan := scheduler.schedule(0.0).plan) is not None:
        num_references = sum(
            len(s.blocks.tables[0].live_blocks) for s in scheduler.rows.sequences()
        )
        saved.append(num_references - scheduler.memory.kv.pools[0].num_used)
        branching.submit(plan)
        ended += scheduler.update(branching.next_result(), 0.0).outputs.finished
        scheduler.check_invariants()
    assert len(ended) == (3 if beams else 12)
    for update, _ in ended if beams else []:
        texts = {tuple(beam.token_ids) for beam in update.beams or ()}
        assert len(texts) == 4 and {len(text) for text in texts} == {20}, "the beams must differ"
    # Four sequences in each of two groups share two full prompt blocks; beams share more.
    assert max(saved) > 12 if beams else saved[-1] in (6, 12)
