"""Who is served first, by policy."""

import numpy as np
import pytest

from quire.base.cache_group import CacheGroup
from quire.base.config import SchedulerConfig
from quire.base.errors import ConfigError
from quire.base.plan import Plan, StepResult
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.policy import policies
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel
from quire.scheduler.scheduler import Scheduler
from tests.support.scheduler.fake_device import make_request

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


# ---- time ------------------------------------------------------------------------------------


class NotEmpty(Fifo):
    def __len__(self) -> int:
        return 1


def test_a_policy_of_another_package_must_be_empty_when_it_is_made(monkeypatch) -> None:
    monkeypatch.setattr(policies, "load_plugin", lambda kind, name, known: Fifo)
    assert policies.make_policy("theirs") is Fifo
    monkeypatch.setattr(policies, "load_plugin", lambda kind, name, known: NotEmpty)
    with pytest.raises(ConfigError, match="is not empty when it is made"):
        policies.make_policy("theirs")
