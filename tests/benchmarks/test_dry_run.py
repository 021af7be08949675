"""The scheduler without a model."""

from benchmarks.virtual.dry_run import dry_request, dry_run
from quire.base.config import SchedulerConfig


def test_dry_run_serves_requests_to_their_ends() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16)
    scheduler, executor = dry_run(16, 4, config, 32, enable_prefix_caching=True)
    for i in range(5):
        scheduler.add(dry_request(str(i), [i] * 6, max_tokens=4), 0.0)
    ended: list[str] = []
    while (plan := scheduler.schedule(0.0).plan) is not None:
        executor.submit(plan)
        outputs = scheduler.update(executor.next_result(), 0.0).outputs
        ended += [finish.reason for _, finish in outputs.finished]
        scheduler.check_invariants()
    assert ended == ["length"] * 5
