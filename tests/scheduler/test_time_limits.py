"""Requests with a timeout."""

from quire.base.messages import MeasuredRates
from quire.scheduler.core.queue import Fifo
from tests.support.engine.updates import error_of
from tests.support.scheduler.plain_scheduler import add, answer, scheduler_of, step


def test_late_requests_end_with_an_error_and_free_their_blocks() -> None:
    scheduler = scheduler_of(Fifo, budget=8, max_num_seqs=2)
    add(scheduler, "runs", 4, timeout_s=2.0)
    add(scheduler, "waits", 400, timeout_s=3.0)
    add(scheduler, "free", 4)
    add(scheduler, "n", 4, n=2, temperature=1.0, timeout_s=3.0)
    step(scheduler, 1.0)
    assert scheduler.control(MeasuredRates(), 1.0).next_s == 2.0
    plan = scheduler.schedule(2.0).plan
    assert plan is not None and "runs" not in scheduler.lifecycle.sequences
    outputs = scheduler.update(answer(plan), 2.0).outputs
    [(update, finish)] = outputs.finished
    assert (update.request_id, finish.reason) == ("runs", "timeout")
    assert "timeout_s=2" in error_of(update) and "1 output token" in error_of(update)
    scheduler.check_invariants()
    plan = scheduler.schedule(3.0).plan
    late = [ended.request_id for ended, _ in scheduler.update(answer(plan), 3.0).outputs.finished]  # type: ignore[arg-type]
    assert sorted(late) == ["n", "waits"] and list(scheduler.lifecycle.sequences) == ["free"]


def test_a_timeout_is_reported_when_no_request_runs() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "late", 4, now=1.0, timeout_s=0.5)
    decisions = scheduler.schedule(1.5)
    assert decisions.plan is None
    assert [finish.reason for _, finish in decisions.outputs.finished] == ["timeout"]
    assert not scheduler.has_work and scheduler.memory.kv.pools[0].num_used == 0


def test_a_reused_request_id_does_not_inherit_the_old_timeout() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "name", 4, max_tokens=1, timeout_s=5.0)
    step(scheduler, 1.0)
    add(scheduler, "name", 4, now=4.0, timeout_s=5.0)
    step(scheduler, 6.0)
    assert "name" in scheduler.lifecycle.sequences
