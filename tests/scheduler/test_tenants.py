"""Tenants: the least served tenant comes first, and absent tenants are remembered."""

import numpy as np
import pytest

from quire.base.messages import Abort
from quire.scheduler.core.queue import Fifo, MakePolicy
from quire.scheduler.policy.srtf import Srtf
from quire.scheduler.policy.two_level import TwoLevel
from quire.scheduler.tenants import Tenants
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.plain_scheduler import add, scheduler_of, step


@pytest.mark.parametrize("policy", [Fifo, Srtf, TwoLevel])
def test_a_light_tenant_does_not_wait_in_the_queue_of_a_heavy_one(policy: MakePolicy) -> None:
    scheduler = scheduler_of(policy)
    for i in range(50):
        add(scheduler, f"heavy {i}", 16, tenant="heavy")
    for _ in range(5):
        step(scheduler)
    add(scheduler, "light", 16, tenant="light")
    assert "light" in step(scheduler)


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


def test_a_returning_tenant_starts_at_the_lowest_counter() -> None:
    tenants = Tenants()
    assert [tenants.enter("a"), tenants.enter("b")] == [0, 1]
    tenants.charge(np.array([100, 300]))
    tenants.enter("c")
    assert tenants.served("c") == 99
    tenants.leave("a")
    tenants.charge(np.array([0, 50]))
    assert tenants.enter("c") == 2
    tenants.charge(np.array([0, 0, 900]))
    tenants.enter("a")
    assert tenants.served("a") == 349
    assert tenants.served("c") == 999, "a tenant's counter is kept while it is absent"


@pytest.mark.parametrize("num_present", [1, 3])
def test_the_memory_for_counters_of_many_tenants_is_bounded(
    monkeypatch: pytest.MonkeyPatch, num_present: int
) -> None:
    """This holds even if a tenant is always present and never served."""
    monkeypatch.setattr("quire.scheduler.tenants.MAX_ABSENT", 50)
    tenants = Tenants()
    for i in range(num_present):
        tenants.enter(f"stays {i}")
    for i in range(5000):
        slot = tenants.enter(f"t{i}")
        tenants.charge(np.bincount([slot, 0], [1, 10 * (num_present == 1)]).astype(np.int64))
        tenants.leave(f"t{i}")
    assert len(tenants._tenants) == 50 + num_present and len(tenants._served) <= 128


@pytest.mark.parametrize("num_names", [1, 1000])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_order_of_tenants_forgets_tenants_that_leave(num_names: int, overlap: bool) -> None:
    """Whether a tenant has requests one after the other, or several tenants take turns."""
    tenants = Tenants()
    for i in range(1000):
        tenants.enter(f"t{i % num_names}")
        if not overlap:
            tenants.leave(f"t{i % num_names}")
        elif i:
            tenants.leave(f"t{(i - 1) % num_names}")
    assert len(tenants._lowest._heap) <= 100 and len(tenants._lowest._numbers) <= 2


def test_a_tenant_is_absent_after_its_last_request() -> None:
    scheduler = scheduler_of(Fifo)
    for name in ("a", "b"):
        scheduler.add(make_request(name, [1, 2, 3], tenant="mine"), 0.0)
    tenants = scheduler.lifecycle.queue.tenants
    scheduler.control(Abort("a"), 0.0)
    assert tenants._present == {"mine"} and not tenants._absent
    scheduler.control(Abort("b"), 0.0)
    assert not tenants._present and list(tenants._absent) == ["mine"]
