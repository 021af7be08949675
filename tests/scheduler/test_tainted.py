"""The requests that a failed row taints, over host memory and over forks: on plans made by hand.

Covers `scheduler/core/failures.py`.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.base.errors import STEP_FAILED
from quire.base.plan import Move, Plan, RowFork, RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.base.step_outputs import Failure, Finish
from quire.scheduler.core.plans import InFlightStep, SharedBlocks
from quire.scheduler.core.queue import Fifo
from quire.scheduler.policy.two_level import TwoLevel
from quire.scheduler.tainted import find_tainted
from tests.scheduler.test_policies import scheduler_of
from tests.scheduler.test_scheduler_machine import SchedulerMachine as Machine
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.plain_scheduler import answer

FAILS = {0: Finish("error", error=Failure(STEP_FAILED, "it failed"))}


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def owner(row: int) -> SimpleNamespace:
    """A sequence, as far as it is looked at."""
    return SimpleNamespace(request=f"request of row {row}")


def flight(
    step: int,
    rows: list[int],
    shared: list[Any],
    moves: tuple[Move, ...] = (),
    started: list[int] | None = None,
) -> InFlightStep:
    starts = tuple(RowStart(row, ints(1, 2, 3), 2, 3, SamplingParams(), 0) for row in started or [])
    plan = Plan(step, rows=ints(*rows), sample_rows=ints(*rows), moves=moves, started=starts)
    lines = rows + [row for row in started or [] if row not in rows]
    owners = np.array([owner(row) for row in lines], object)
    epochs = np.zeros(len(lines), np.int64)
    blocks = [SharedBlocks(*each) for each in shared]
    return InFlightStep(plan, epochs, owners, epochs[: len(rows)], owners[: len(rows)], blocks)


def swap(source: int, destination: int) -> Move:
    return Move("swap_out", 0, ints(source), ints(destination))


def load(source: int, destination: int) -> Move:
    return Move("load", 0, ints(source), ints(destination))


def test_what_a_failed_row_computed_breaks_whoever_loads_it_from_the_host() -> None:
    """Block 5 goes out to host block 2 and comes back as block 7; 8 and 9 have nothing to do
    with it."""
    flights = [
        flight(1, [0, 1], [(0, [[]], [[5]]), (1, [[8]], [[9]])]),
        flight(2, [1], [], (swap(5, 2), swap(9, 3))),
        flight(3, [2, 3], [(2, [[7]], [[]]), (3, [[6]], [[]])], (load(2, 7), load(3, 6))),
    ]
    broken = find_tainted(flights, FAILS, 1)
    assert set(broken.failed) == {(0, 0)} and set(broken.dependants) == {(2, 0)}
    assert broken.host == [{2}]


def test_swaps_that_were_lost_break_whoever_loads_them() -> None:
    """Also where no row has failed; a later swap to the same host block makes it good again."""
    flights = [
        flight(1, [0], [], (swap(5, 2), swap(6, 3))),
        flight(2, [1], [(1, [[7]], [[]])], (load(2, 7),)),
        flight(3, [2], [(2, [[8]], [[]])], (swap(4, 3), load(3, 8))),
    ]
    broken = find_tainted(flights, {}, 1, has_lost_swaps=True)
    assert not broken.failed and set(broken.dependants) == {(1, 0)}
    assert broken.host == [{2}]
    assert not find_tainted(flights, {}, 1).dependants


def test_only_the_swaps_of_the_step_that_lost_them_are_lost() -> None:
    flights = [
        flight(1, [0], [], (swap(5, 2),)),
        flight(2, [1], [], (swap(6, 3),)),
        flight(3, [2, 4], [(2, [[7]], [[]]), (4, [[8]], [[]])], (load(2, 7), load(3, 8))),
    ]
    broken = find_tainted(flights, {}, 1, has_lost_swaps=True)
    assert set(broken.dependants) == {(2, 0)} and broken.host == [{2}]
    broken = find_tainted(flights, {}, 1, has_lost_swaps=True, num_void=2)
    assert broken.dependants.keys() >= {(2, 0), (4, 0)} and broken.host == [{2, 3}]


def test_rows_that_come_back_and_compute_nothing_yet_are_broken_as_others_are() -> None:
    """Rows 1 and 2 of a group come back, with tokens for one of them; so does 3, from elsewhere."""
    shared = [(1, [[7]], [[]]), (2, [[8]], [[]]), (3, [[9]], [[]])]
    moves = (load(2, 7), load(3, 8), load(4, 9))
    flights = [
        flight(1, [0], [], (swap(5, 2), swap(6, 3))),
        flight(2, [0, 1], shared, moves, started=[1, 2, 3]),
    ]
    broken = find_tainted(flights, {}, 1, has_lost_swaps=True)
    assert broken.dependants == {(1, 0): owner(1), (2, 0): owner(2)}
    flights[1].omit_rows(broken.dependants)
    assert flights[1].omitted == {1, 2}


def test_what_is_forked_from_a_row_that_is_left_out_is_void() -> None:
    """The child samples from its parent's logits, whatever it shares with whom."""
    plan = Plan(
        4,
        rows=ints(0, 1),
        sample_rows=ints(0, 1, 2, 3),
        sources=ints(0, 1, 0, 1),
        forked=(RowFork(0, 2, 1), RowFork(1, 3, 1)),
    )
    owners, epochs = np.array(["a", "b", "c", "d"], object), np.zeros(4, np.int64)
    mine = InFlightStep(plan, epochs, owners, epochs, owners, [])
    mine.omit_rows({(0, 0)})
    assert mine.omitted == {0, 2}


def test_who_begins_with_what_a_failing_request_computes_again() -> None:
    """A reset makes a prefix compute again while a step of its former row, which fails, is on its
    way; the last request begins with a block of the plan behind that step."""
    machine = Machine()
    machine.start(
        policy=TwoLevel, depth=2, threshold=5, rows=5, budget=40, spare=9, lazy=True,
        caching=True, mode="recompute", tier=None, stores=1,
    )  # fmt: skip
    machine.pin(seed=0, length=3, pin_s=5.0, salt="other", cursed_at=None)
    machine.pin(seed=0, length=21, pin_s=5.0, salt="", cursed_at=12)
    machine.open(length=3, max_tokens=None, tenant="")
    machine.append(pick=20, length=3, is_last=True)
    machine.plan()
    machine.plan()
    machine.reset()
    machine.open(length=11, max_tokens=None, tenant="")
    machine.teardown()


def test_a_failed_row_that_stands_on_another_failed_one_is_a_dependant() -> None:
    """Row 1 holds a block that row 0 was to compute; row 2 one of row 1; row 3 none of theirs."""
    first = flight(1, [0, 1, 3], [(0, [[]], [[5]]), (1, [[5]], [[6]]), (3, [[4]], [[7]])])
    second = flight(2, [2], [(2, [[6]], [[8]])])
    found = find_tainted([first, second], {0: "bad", 1: "worse"}, 1)  # type: ignore[dict-item]
    assert found.failed == {(0, 0): (owner(0), "bad")}
    assert found.dependants == {(1, 0): owner(1), (2, 0): owner(2)}
    assert found.blocks == [{5, 6, 8}]
    assert (3, 0) not in found and (1, 0) in found


def test_of_a_request_that_fails_all_rows_of_later_plans_are_void() -> None:
    """Row 1 fails, and row 0 is of the same request; row 2 goes on."""
    scheduler = scheduler_of(Fifo, pipeline_depth=2)
    scheduler.add(make_request("pair", [1, 2, 3], n=2, max_tokens=9), 0.0)
    scheduler.add(make_request("other", [4, 5, 6], max_tokens=9), 0.0)
    plans = [scheduler.schedule(0.0).plan for _ in range(2)]
    for errors, omitted in (({}, set()), ({1: "garbage"}, {0, 1})):
        plan = plans.pop(0)
        assert plan is not None
        result = answer(plan).replace(row_errors=errors)
        assert scheduler.update(result, 0.0).omitted == (frozenset(omitted),)
        plans.append(scheduler.schedule(0.0).plan)
