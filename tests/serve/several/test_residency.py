"""Which models are loaded, with a clock that the test controls: `serve/several/residency.py`."""

import random

import pytest

from quire.serve.several.messages import DEAD, FAILED, LOADED, LOADING, UNLOADED, UNLOADING
from quire.serve.several.residency import (
    NEVER,
    RETRY_S,
    TURN_S,
    Denied,
    Granted,
    Lease,
    NotifyHolder,
    Order,
    Residency,
    Start,
    Stop,
)
from tests.support.cases import slow_but

P, Q = 1, 2  # API processes


def loaded(*names: str, **options: float | int) -> Residency:
    """Return a residency of three models, of which the named ones are loaded at time 0."""
    residency = Residency(["a", "b", "c"], **options)  # type: ignore[arg-type]
    for name in names:
        residency.begin(name, 0.0)
        residency.loaded(name, 0.0)
    assert residency.decide(0.0) == []
    return residency


def test_loaded_model_is_granted_immediately() -> None:
    residency = loaded("a")
    residency.request("a", (P, 1), 1.0)
    assert residency.decide(1.0) == [Granted("a", (P, 1))]
    assert residency.decide(1.0) == []


def test_one_load_serves_all_waiting_requests() -> None:
    residency = loaded("a")
    residency.request("b", (P, 1), 1.0)
    assert residency.decide(1.0) == [Start("b")]
    residency.request("b", (Q, 1), 2.0)
    assert residency.decide(2.0) == []
    residency.loaded("b", 3.0)
    assert residency.decide(3.0) == [Granted("b", (P, 1)), Granted("b", (Q, 1))]
    assert residency.models["b"].load_s == 2.0


def test_least_recently_used_model_is_unloaded_first() -> None:
    residency = loaded("a", "b", max_loaded=2)
    for number, name in enumerate("ab"):  # a is requested first, and used last
        residency.request(name, (P, number), 1.0)
        residency.decide(1.0)
    residency.give_back("b", (P, 1), 2.0)
    residency.give_back("a", (P, 0), 3.0)
    residency.request("c", (P, 2), 4.0)
    assert residency.decide(4.0) == [Stop("b")]
    assert residency.decide(5.0) == []  # an unloading model still counts
    residency.unloaded("b", 6.0)
    assert residency.decide(6.0) == [Start("c")]
    assert [each.state for each in residency.models.values()] == [LOADED, UNLOADED, LOADING]


def test_leased_model_is_unloaded_only_after_its_last_lease() -> None:
    residency = loaded("a", max_loaded=1)
    residency.request("a", (P, 1), 1.0)
    residency.decide(1.0)
    residency.request("b", (Q, 1), 2.0)
    assert residency.decide(2.0) == [NotifyHolder("a", P)]
    residency.request("a", (Q, 2), 3.0)  # queued after the waiting request
    assert residency.decide(3.0) == []
    residency.give_back("a", (P, 1), 4.0)
    assert residency.decide(4.0) == [Stop("a")]
    residency.unloaded("a", 5.0)
    assert residency.decide(5.0) == [Start("b")]
    residency.loaded("b", 6.0)
    assert residency.decide(6.0) == [Granted("b", (Q, 1))]
    assert residency.decide(7.0) == [NotifyHolder("b", Q)]


def test_model_stays_loaded_when_the_waiting_request_leaves() -> None:
    residency = loaded("a", max_loaded=1)
    residency.request("a", (P, 1), 1.0)
    residency.decide(1.0)
    residency.request("b", (Q, 1), 2.0)
    residency.decide(2.0)
    residency.request("a", (P, 2), 3.0)
    residency.give_back("b", (Q, 1), 4.0)
    assert residency.decide(4.0) == [Granted("a", (P, 2))]


def test_turn_lasts_as_long_as_loading_took() -> None:
    residency = Residency(["a", "b"], max_loaded=1)
    residency.begin("a", 0.0)
    residency.loaded("a", 2.0)
    residency.request("b", (P, 1), 2.5)
    assert residency.decide(2.5) == [] and residency.due_s() == 4.0
    residency.request("a", (P, 2), 3.0)  # its turn is not over
    assert residency.decide(3.0) == [Granted("a", (P, 2))]
    residency.give_back("a", (P, 2), 3.5)
    assert residency.decide(3.5) == []
    assert residency.decide(4.0) == [Stop("a")]


def test_turn_has_a_maximum_length() -> None:
    residency = Residency(["a", "b"], max_loaded=1)
    residency.begin("a", 0.0)
    residency.loaded("a", 100.0)
    residency.request("b", (P, 1), 100.0)
    residency.decide(100.0)
    assert residency.due_s() == 100.0 + TURN_S


def test_idle_models_are_unloaded() -> None:
    residency = loaded("a", "b", idle_s=10.0)
    residency.request("a", (P, 1), 5.0)
    residency.decide(5.0)
    assert residency.due_s() == 10.0
    assert residency.decide(9.9) == []
    assert residency.decide(10.0) == [Stop("b")]
    assert residency.due_s() == NEVER  # a is in use
    residency.give_back("a", (P, 1), 30.0)
    assert residency.decide(30.0) == [] and residency.due_s() == 40.0
    assert residency.decide(40.0) == [Stop("a")]


def test_without_idle_s_no_model_is_unloaded() -> None:
    residency = loaded("a")
    assert residency.decide(1e9) == [] and residency.due_s() == NEVER


def test_dead_api_process_releases_its_leases_and_requests() -> None:
    residency = loaded("a", max_loaded=1)
    residency.request("a", (P, 1), 1.0)
    residency.decide(1.0)
    residency.request("b", (P, 2), 2.0)
    residency.request("b", (Q, 1), 2.0)
    residency.decide(2.0)
    residency.forget(P, 3.0)
    assert residency.decide(3.0) == [Stop("a")]
    residency.forget(Q, 4.0)
    residency.unloaded("a", 5.0)
    assert residency.decide(5.0) == []  # no request for b is left


def test_failed_load_is_reported_and_retried_later() -> None:
    residency = loaded("a")
    residency.request("b", (P, 1), 1.0)
    residency.decide(1.0)
    residency.failed("b", "no room.", 2.0)
    assert residency.decide(2.0) == [Denied("b", (P, 1), "no room.")]
    residency.request("b", (P, 2), 3.0)
    assert residency.decide(3.0) == [Denied("b", (P, 2), "no room.")]
    assert residency.models["b"].state == FAILED
    again_s = 2.0 + RETRY_S
    residency.request("b", (P, 3), again_s)
    assert residency.decide(again_s) == [Start("b")]


def test_failed_load_leaves_room_for_another_model() -> None:
    residency = loaded(max_loaded=1)
    residency.request("a", (P, 1), 1.0)
    residency.request("b", (P, 2), 2.0)
    assert residency.decide(2.0) == [Start("a")]
    residency.failed("a", "broken.", 3.0)
    assert residency.decide(3.0) == [Denied("a", (P, 1), "broken."), Start("b")]


def test_dead_model_is_never_loaded_again() -> None:
    residency = loaded("a")
    residency.died("a", "killed.", 1.0)
    residency.request("a", (P, 1), 1e6)
    assert residency.decide(1e6) == [Denied("a", (P, 1), "killed.")]
    assert residency.models["a"].state == DEAD


def test_model_that_restarts_under_a_lease_serves_again() -> None:
    residency = loaded("a")
    residency.request("a", (P, 1), 1.0)
    residency.decide(1.0)
    residency.begin("a", 2.0)
    residency.request("a", (P, 2), 3.0)
    assert residency.decide(3.0) == []
    residency.loaded("a", 4.0)
    assert residency.decide(4.0) == [Granted("a", (P, 2))]
    residency.give_back("a", (P, 1), 5.0)
    assert residency.models["a"].leases == {(P, 2)}


@pytest.mark.parametrize("seed", slow_but(range(20), *range(8)))
@pytest.mark.parametrize("limit", [1, 2])
def test_random_events_keep_the_rules_and_serve_all_requests(seed: int, limit: int) -> None:
    """Clients request and release at random; models load and unload with delays; loads may fail."""
    chance = random.Random(seed)
    residency = Residency(["a", "b", "c"], limit, idle_s=chance.choice([0.0, 7.0]))
    open_leases: dict[Lease, str] = {}
    pending: dict[Lease, tuple[str, float]] = {}
    events: list[tuple[float, str, str]] = []  # time, event, model
    longest, number, now = 0.0, 0, 0.0

    def carry_out(orders: list[Order]) -> None:
        nonlocal longest
        for order in orders:
            if isinstance(order, Start):
                events.append((now + chance.uniform(0.5, 2.0), "loaded", order.model))
            elif isinstance(order, Stop):
                assert order.model not in open_leases.values(), "unloaded under a lease"
                events.append((now + chance.uniform(0.1, 0.5), "unloaded", order.model))
            elif isinstance(order, Granted):
                open_leases[order.lease] = order.model
            if isinstance(order, Granted | Denied):
                longest = max(longest, now - pending.pop(order.lease)[1])
        states = [each.state for each in residency.models.values()]
        assert sum(state in (LOADING, LOADED, UNLOADING) for state in states) <= limit

    while now < 300.0:
        now += 0.1
        if now < 200.0 and chance.random() < 0.5:
            number += 1
            lease, model = (chance.choice([P, Q]), number), chance.choice("abc")
            pending[lease] = (model, now)
            residency.request(model, lease, now)
        for lease, model in list(open_leases.items()):
            if chance.random() < 0.2:
                del open_leases[lease]
                residency.give_back(model, lease, now)
        for event in [event for event in events if event[0] <= now]:
            events.remove(event)
            if event[1] == "unloaded":
                residency.unloaded(event[2], now)
            elif chance.random() < 0.1:
                residency.failed(event[2], "bad luck.", now)
            else:
                residency.loaded(event[2], now)
        carry_out(residency.decide(now))
    assert not pending and number > 500
    assert longest < 30.0


def test_fault_is_reported_until_the_model_is_loaded() -> None:
    residency = loaded("a", "b")
    residency.begin("a", 1.0, "its process ended.")
    residency.failed("b", "the file is gone.", 1.0)
    residency.request("b", (P, 1), 2.0 + RETRY_S)
    assert residency.decide(2.0 + RETRY_S) == [Start("b")]
    reported = [(each.state, each.why) for each in residency.models.values()]
    assert reported[:2] == [(LOADING, "its process ended."), (LOADING, "the file is gone.")]
    for name in "ab":
        residency.loaded(name, 20.0)
        assert residency.models[name].why == ""


def test_fault_is_reported_while_the_model_waits_for_room() -> None:
    residency = loaded("a", max_loaded=1)
    residency.failed("b", "the file is gone.", 1.0)
    residency.request("a", (P, 1), 1.0)
    residency.decide(1.0)
    residency.request("b", (P, 2), 2.0 + RETRY_S)
    residency.decide(2.0 + RETRY_S)
    waits = residency.models["b"]
    assert (waits.state, waits.why) == (UNLOADED, "the file is gone.")
