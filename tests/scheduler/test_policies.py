"""Who is served first: by policy, by tenant, by time; and how the tokens of a step are shared."""

import numpy as np
import pytest

from quire.base.config import SchedulerConfig
from quire.base.messages import MeasuredRates
from quire.base.model_spec import CacheGroup
from quire.base.plan import Plan, StepResult
from quire.kv.manager import KVManager
from quire.scheduler import two_level
from quire.scheduler.fifo import Fifo
from quire.scheduler.memory import Memory
from quire.scheduler.policy import MakePolicy
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.srtf import Srtf
from quire.scheduler.tenants import Tenants
from quire.scheduler.two_level import TwoLevel
from tests.scheduler.device import make_request
from tests.updates import error_of

BLOCK, MAX_LEN = 4, 512


def scheduler_of(
    policy: MakePolicy, budget: int = 16, blocks: int = 400, **settings: object
) -> Scheduler:
    config = SchedulerConfig(
        **{"max_num_seqs": 64, "max_num_batched_tokens": budget, **settings}  # type: ignore[arg-type]
    )
    kv = KVManager((CacheGroup("full", (0,), 1, 1),), (blocks,), BLOCK)
    return Scheduler(Memory(kv, budget), config, MAX_LEN, policy)


def add(scheduler: Scheduler, name: str, num_tokens: int, now: float = 0.0, **more: object) -> None:
    """A prompt that shares nothing with others, unless `like` says whose first tokens it has."""
    kind = sum(map(ord, str(more.pop("like", name)))) * 1000
    prompt = list(range(kind, kind + num_tokens))
    more = {"max_tokens": 50, "temperature": 0.0, **more}
    scheduler.add(make_request(name, prompt, **more), now)


def step(scheduler: Scheduler, now: float = 0.0) -> dict[str, int]:
    """One step; the tokens that each request got."""
    plan = scheduler.schedule(now).plan
    if plan is None:
        return {}
    got = {
        sequence.request.request_id: num
        for sequence, num in zip(
            scheduler.rows.table.sequences[plan.rows], plan.num_tokens.tolist(), strict=True
        )
    }
    scheduler.update(answer(plan), now)
    scheduler.check_invariants()
    return got


def answer(plan: Plan) -> StepResult:
    num = len(plan.sample_rows)
    return StepResult(plan.step_id, np.full((num, 1), 7, np.int32), np.ones(num, np.int32))


def firsts(scheduler: Scheduler, most: int = 200) -> list[str]:
    """Requests in the order in which they are admitted."""
    order: list[str] = []
    for _ in range(most):
        order += [name for name in step(scheduler) if name not in order]
        if not len(scheduler.lifecycle.queue):
            break
    return order


# ---- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Fifo, ["long", "middle", "short"]), (Srtf, ["short", "middle", "long"]),
     (TwoLevel, ["short", "middle", "long"])],
)  # fmt: skip
def test_order_of_three(policy: MakePolicy, expected: list[str]) -> None:
    scheduler = scheduler_of(policy)
    for name, num in (("long", 40), ("middle", 20), ("short", 8)):
        add(scheduler, name, num)
    assert firsts(scheduler) == expected


def test_fifo_lets_a_long_prompt_finish_first() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "long", 40)
    assert step(scheduler) == {"long": 16}
    add(scheduler, "short", 4)
    assert step(scheduler) == {"long": 16}
    assert step(scheduler) == {"long": 8, "short": 4}


@pytest.mark.parametrize("policy", [Srtf, TwoLevel])
def test_a_short_prompt_passes_a_long_one_under_way(policy: MakePolicy) -> None:
    scheduler = scheduler_of(policy)
    add(scheduler, "long", 40)
    assert step(scheduler) == {"long": 16}
    add(scheduler, "short", 4)
    assert step(scheduler) == {"short": 4, "long": 12}
    assert step(scheduler) == {"short": 1, "long": 12}


@pytest.mark.parametrize("policy", [Srtf, TwoLevel])
def test_a_prompt_nearly_done_passes_a_shorter_one(policy: MakePolicy) -> None:
    scheduler = scheduler_of(policy)
    add(scheduler, "long", 40)
    step(scheduler)
    step(scheduler)
    add(scheduler, "shorter", 30)
    assert step(scheduler) == {"long": 8, "shorter": 8}


@pytest.mark.parametrize("policy", [Srtf, TwoLevel])
def test_hits_are_looked_up_again_within_a_plan(policy: MakePolicy) -> None:
    """When `one` is admitted, `alike` lacks three tokens, and comes before `other`, which lacks
    fewer at first (T algorithm 2, the inner loop)."""
    scheduler = scheduler_of(policy, budget=64)
    add(scheduler, "one", 8)
    add(scheduler, "alike", 11, like="one")
    add(scheduler, "other", 10)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None
    names = [s.request.request_id for s in scheduler.rows.table.sequences[plan.rows]]
    assert list(zip(names, plan.num_tokens.tolist(), strict=True)) == [
        ("one", 8), ("alike", 3), ("other", 10),
    ]  # fmt: skip


def test_a_batch_is_served_before_the_next_one_moves_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_level, "PATIENCE", 1000.0)
    scheduler = scheduler_of(TwoLevel, budget=20)
    for i in range(12):
        add(scheduler, f"r{i}", 20 - i)
    order = firsts(scheduler)
    batch, rest = [f"r{i}" for i in range(8)], [f"r{i}" for i in range(8, 12)]
    assert order == batch[::-1] + rest[::-1]


def test_long_prompts_that_wait_for_each_other_do_not_hold_up_the_next_batch() -> None:
    scheduler = scheduler_of(TwoLevel)
    for i in range(two_level.STAGING + 3):
        add(scheduler, f"long {i}", 60)
    step(scheduler)
    step(scheduler)
    add(scheduler, "short", 4)
    assert "short" in step(scheduler)


@pytest.mark.parametrize(("patience", "is_in_time"), [(1.8, True), (1000.0, False)])
def test_short_requests_cannot_starve_a_long_one(
    monkeypatch: pytest.MonkeyPatch, patience: float, is_in_time: bool
) -> None:
    """160 tokens in order of arrival; twice that is the most that it may take."""
    monkeypatch.setattr(two_level, "PATIENCE", patience)
    scheduler = scheduler_of(TwoLevel)
    add(scheduler, "long", 160)
    num_steps = 0
    while (
        scheduler.rows.sequences()[-1:] == []
        or scheduler.lifecycle.sequences["long"].num_output_tokens == 0
    ):
        add(scheduler, f"short {num_steps}", 12, max_tokens=1)
        step(scheduler)
        num_steps += 1
        if num_steps == 100:
            break
    assert (num_steps <= 2 * 160 / 16) == is_in_time


@pytest.mark.parametrize("policy", [Fifo, Srtf, TwoLevel])
def test_decoding_rows_come_before_prompts(policy: MakePolicy) -> None:
    scheduler = scheduler_of(policy, budget=8)
    add(scheduler, "first", 4)
    add(scheduler, "long", 40)
    assert step(scheduler) == {"first": 4, "long": 4}
    add(scheduler, "later", 2)
    for _ in range(3):
        assert step(scheduler)["first"] == 1


def test_a_step_computes_at_most_the_threshold_of_a_prompt() -> None:
    scheduler = scheduler_of(Fifo, budget=16, long_prefill_token_threshold=6)
    add(scheduler, "long", 40)
    add(scheduler, "other", 9)
    add(scheduler, "third", 9)
    assert step(scheduler) == {"long": 6, "other": 6, "third": 4}


@pytest.mark.parametrize("policy", [Fifo, Srtf, TwoLevel])
def test_a_head_that_does_not_fit_stops_nobody(policy: MakePolicy) -> None:
    """A prompt under way goes on, preempting if it must, while a shorter one waits for memory."""
    scheduler = scheduler_of(policy, blocks=32, max_num_seqs=3)
    add(scheduler, "a", 60)
    add(scheduler, "b", 50)
    add(scheduler, "c", 40)
    for _ in range(400):
        if not scheduler.lifecycle.sequences:
            break
        assert step(scheduler), "nobody goes on"
    assert not scheduler.lifecycle.sequences


# ---- tenants ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Fifo, Srtf, TwoLevel])
def test_a_light_tenant_does_not_stand_in_a_heavy_ones_queue(policy: MakePolicy) -> None:
    scheduler = scheduler_of(policy)
    for i in range(50):
        add(scheduler, f"heavy {i}", 16, tenant="heavy")
    for _ in range(5):
        step(scheduler)
    add(scheduler, "light", 16, tenant="light")
    assert "light" in step(scheduler)


def test_a_heavy_tenants_long_prompt_under_way_is_deferred() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "heavy", 100, tenant="heavy")
    step(scheduler)
    add(scheduler, "light", 12, tenant="light")
    assert step(scheduler) == {"light": 12, "heavy": 4}


def test_priority_comes_before_fairness() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "used", 16, tenant="heavy", max_tokens=1)
    add(scheduler, "light", 16, tenant="light", priority=1)
    add(scheduler, "urgent", 16, tenant="heavy", priority=0)
    assert [list(step(scheduler)), list(step(scheduler))] == [["used"], ["urgent"]]


def test_counters_grow_by_computed_and_sampled_tokens() -> None:
    scheduler = scheduler_of(Fifo, budget=64)
    add(scheduler, "a", 10, tenant="a")
    add(scheduler, "b", 5, tenant="b")
    for _ in range(3):
        step(scheduler)
    served = scheduler.lifecycle.queue.tenants.served
    assert (served("a"), served("b")) == (10 + 1 + 4, 5 + 1 + 4)


def test_who_comes_back_begins_at_the_least_counter() -> None:
    tenants = Tenants()
    slots = np.array([tenants.enter("a"), tenants.enter("b")])
    tenants.charge(slots, np.array([100, 300], np.int32))
    tenants.enter("c")
    assert tenants.served("c") == 99
    tenants.leave("a")
    tenants.charge(slots[1:], np.array([50], np.int32))
    tenants.charge(np.array([tenants.enter("c")]), np.array([900], np.int32))
    tenants.enter("a")
    assert tenants.served("a") == 349
    assert tenants.served("c") == 999, "what a tenant has had is not forgotten while it pauses"


@pytest.mark.parametrize("num_present", [1, 3])
def test_counters_of_many_tenants_take_no_more_and_no_more_memory(
    monkeypatch: pytest.MonkeyPatch, num_present: int
) -> None:
    """Also where somebody is always there who is never served."""
    monkeypatch.setattr("quire.scheduler.tenants.MOST_ABSENT", 50)
    tenants = Tenants()
    for i in range(num_present):
        tenants.enter(f"stays {i}")
    for i in range(5000):
        slot = tenants.enter(f"t{i}")
        tenants.charge(np.array([slot, 0]), np.array([1, 10 * (num_present == 1)], np.int32))
        tenants.leave(f"t{i}")
    assert len(tenants._tenants) == 50 + num_present and len(tenants._served) <= 128


# ---- time ------------------------------------------------------------------------------------


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
    late = [told.request_id for told, _ in scheduler.update(answer(plan), 3.0).outputs.finished]  # type: ignore[arg-type]
    assert sorted(late) == ["n", "waits"] and list(scheduler.lifecycle.sequences) == ["free"]


def test_lateness_is_told_when_nothing_runs() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "late", 4, now=1.0, timeout_s=0.5)
    decisions = scheduler.schedule(1.5)
    assert decisions.plan is None
    assert [finish.reason for _, finish in decisions.outputs.finished] == ["timeout"]
    assert not scheduler.has_work and scheduler.memory.kv.pools[0].num_used == 0


def test_a_request_id_that_is_used_again_is_not_dropped_for_the_first_one() -> None:
    scheduler = scheduler_of(Fifo)
    add(scheduler, "name", 4, max_tokens=1, timeout_s=5.0)
    step(scheduler, 1.0)
    add(scheduler, "name", 4, now=4.0, timeout_s=5.0)
    step(scheduler, 6.0)
    assert "name" in scheduler.lifecycle.sequences
