"""The order of service, by policy."""

import pytest

from quire.base.errors import ConfigError
from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.policy import policies
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel
from quire.scheduler.scheduler import Scheduler
from tests.support.scheduler.plain_scheduler import add, scheduler_of, step


def firsts(scheduler: Scheduler, max_steps: int = 200) -> list[str]:
    """Return the requests in the order of their admission."""
    order: list[str] = []
    for _ in range(max_steps):
        order += [name for name in step(scheduler) if name not in order]
        if not len(scheduler.lifecycle.queue):
            break
    return order


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(Fifo, ["long", "middle", "short"]), (Srtf, ["short", "middle", "long"]),
     (TwoLevel, ["short", "middle", "long"])],
)  # fmt: skip
def test_each_policy_admits_three_prompts_in_its_order(
    policy: MakePolicy, expected: list[str]
) -> None:
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
