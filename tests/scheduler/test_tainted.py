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
    """Return a stand-in for a sequence."""
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


def test_a_row_that_loads_a_failed_row_s_block_from_the_host_is_tainted() -> None:
    """Block 5 is swapped out to host block 2 and loaded as block 7. Blocks 8 and 9 are
    unrelated."""
    flights = [
        flight(1, [0, 1], [(0, [[]], [[5]]), (1, [[8]], [[9]])]),
        flight(2, [1], [], (swap(5, 2), swap(9, 3))),
        flight(3, [2, 3], [(2, [[7]], [[]]), (3, [[6]], [[]])], (load(2, 7), load(3, 6))),
    ]
    broken = find_tainted(flights, FAILS, 1)
    assert set(broken.failed) == {(0, 0)} and set(broken.dependants) == {(2, 0)}
    assert broken.host == [{2}]


def test_a_row_that_loads_a_lost_swap_is_tainted() -> None:
    """No row has failed here. A later swap to the same host block makes it valid again."""
    flights = [
        flight(1, [0], [], (swap(5, 2), swap(6, 3))),
        flight(2, [1], [(1, [[7]], [[]])], (load(2, 7),)),
        flight(3, [2], [(2, [[8]], [[]])], (swap(4, 3), load(3, 8))),
    ]
    broken = find_tainted(flights, {}, 1, has_lost_swaps=True)
    assert not broken.failed and set(broken.dependants) == {(1, 0)}
    assert broken.host == [{2}]
    assert not find_tainted(flights, {}, 1).dependants


def test_only_the_swaps_of_the_failed_steps_are_lost() -> None:
    flights = [
        flight(1, [0], [], (swap(5, 2),)),
        flight(2, [1], [], (swap(6, 3),)),
        flight(3, [2, 4], [(2, [[7]], [[]]), (4, [[8]], [[]])], (load(2, 7), load(3, 8))),
    ]
    broken = find_tainted(flights, {}, 1, has_lost_swaps=True)
    assert set(broken.dependants) == {(2, 0)} and broken.host == [{2}]
    broken = find_tainted(flights, {}, 1, has_lost_swaps=True, num_void=2)
    assert broken.dependants.keys() >= {(2, 0), (4, 0)} and broken.host == [{2, 3}]


def test_resumed_rows_that_compute_nothing_yet_are_tainted_like_others() -> None:
    """Rows 1 and 2 of a group resume, with tokens for one of them. Row 3 resumes on its own."""
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


def test_omitting_a_row_omits_the_rows_forked_from_it() -> None:
    """The child samples from its parent's logits, whatever blocks it shares."""
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


def test_a_request_on_blocks_of_a_failing_pin_gets_its_own_tokens() -> None:
    """After a reset, a pin is recomputed while a step of its former row, which fails, is in flight.
    The last request begins with a block of the plan after that step."""
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


def test_a_failed_row_that_depends_on_another_failed_row_is_a_dependant() -> None:
    """Row 1 holds a block that row 0 was to compute; row 2 one of row 1; row 3 none of theirs."""
    first = flight(1, [0, 1, 3], [(0, [[]], [[5]]), (1, [[5]], [[6]]), (3, [[4]], [[7]])])
    second = flight(2, [2], [(2, [[6]], [[8]])])
    found = find_tainted([first, second], {0: "bad", 1: "worse"}, 1)  # type: ignore[dict-item]
    assert found.failed == {(0, 0): (owner(0), "bad")}
    assert found.dependants == {(1, 0): owner(1), (2, 0): owner(2)}
    assert found.blocks == [{5, 6, 8}]
    assert (3, 0) not in found and (1, 0) in found


def test_all_rows_of_a_failed_request_are_omitted_from_later_plans() -> None:
    """Row 1 fails, and row 0 is of the same request; row 2 continues."""
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
