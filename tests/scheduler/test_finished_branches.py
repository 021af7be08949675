"""Branches that no later turn continues are evicted first, and no answer changes.

Covers `scheduler/policy/extensions.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.base.kv_orders import Kept
from quire.base.messages import Abort
from quire.base.plan import StepResult
from quire.base.plugins import OWN_EXTENSIONS
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVBlocks, KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.policy.extensions import BUILT_IN
from quire.scheduler.reuse.finished_branches import FinishedBranches
from quire.scheduler.scheduler import Scheduler
from tests.scheduler.test_extension import run
from tests.scheduler.test_partial_blocks import TurnRules
from tests.scheduler.test_scheduler_machine import FULL, STATES, WINDOW, StoresMachine
from tests.support.scheduler.fake_device import make_request
from tests.support.scheduler.state_machines import FEW, run_machine

SIZE = 4
TURN = [7, 7]  # the answer to a turn (`run`), whose last token is not computed


class Lab:
    """A scheduler with 16 blocks of 4 tokens, `num_host` more in host memory, and stores."""

    def __init__(
        self,
        num_host: int = 0,
        extensions: tuple[str, ...] = OWN_EXTENSIONS,
        num_rows: int = 4,
        num_stores: int = 0,
    ) -> None:
        limits = (num_host,) if num_host else None
        self.kv = KVManager((FULL,), (16,), SIZE, host_limits=limits)
        config = SchedulerConfig(
            max_num_seqs=num_rows, max_num_batched_tokens=64, scheduler_extensions=extensions
        )
        memory = Memory(self.kv, 64, watermark=0.0)
        self.scheduler = Scheduler(memory, config, 64, num_stores=num_stores)
        self.num = 0

    def turn(self, prompt: list[int], num_new: int = len(TURN)) -> int:
        """Serve a turn. Return the number of tokens that it computed at first."""
        self.num += 1
        num = run(self.scheduler, make_request(f"r{self.num}", prompt, max_tokens=num_new))
        self.scheduler.check_invariants()
        return num

    def serve(self, prompt: list[int]) -> int:
        """Serve full blocks without a turn's end. Return the number of tokens that it computed."""
        return self.turn(prompt, 1)

    def step(self) -> int:
        """Run one step. Return the number of its tokens."""
        plan = self.scheduler.schedule(0.0).plan
        assert plan is not None
        num = len(plan.sample_rows)
        tokens = np.full((num, 1), TURN[0], np.int32)
        self.scheduler.update(StepResult(plan.step_id, tokens, np.ones(num, np.int32)), 0.0)
        return plan.num_scheduled_tokens

    def family(self) -> None:
        """Serve a parent's turn, two subagents of four blocks each, and the parent's next turn."""
        self.turn(PARENT)
        self.turn(ONE)
        self.turn(OTHER)
        assert self.turn(NEXT) == len(NEXT) - 2 * SIZE

    @property
    def branches(self) -> FinishedBranches:
        [found] = [each for each in self.scheduler.features if isinstance(each, FinishedBranches)]
        return found


ALIEN = list(range(100, 116))  # another conversation, of four blocks
PARENT = list(range(7))  # two blocks with its answer
CONTEXT = [*PARENT, *TURN]
ONE, OTHER = ([*CONTEXT, *range(first, first + 14)] for first in (20, 40))
NEXT = [*CONTEXT, *range(60, 66)]
NEW = list(range(200, 232))  # eight blocks

both = pytest.mark.parametrize(("extensions", "is_there"), [(OWN_EXTENSIONS, True), ((), False)])


def test_the_settings_know_the_names_of_quires_own_extensions() -> None:
    assert tuple(BUILT_IN) == OWN_EXTENSIONS


@both
def test_branches_of_subagents_are_evicted_before_an_older_conversation(
    extensions: tuple[str, ...], is_there: bool
) -> None:
    """Without the extension, the older conversation is evicted first. The parent stays."""
    lab = Lab(extensions=extensions)
    lab.serve(ALIEN)
    lab.family()
    assert lab.kv.pools[0].num_cached == 16
    assert lab.serve(NEW[:28]) == 28
    assert lab.turn([*NEXT, *TURN, 1, 2]) == 3
    assert lab.serve(ALIEN) == (4 if is_there else 16)


@both
def test_a_branch_that_is_continued_is_no_longer_finished(
    extensions: tuple[str, ...], is_there: bool
) -> None:
    """It stays in host memory, and so does an older conversation. The other branch is evicted."""
    again, found = [*ONE, *TURN, 1], []
    for prompt in (again, ALIEN):
        lab = Lab(16, extensions)
        lab.serve(ALIEN)
        lab.family()
        assert lab.turn(again) == 2
        for new in (NEW, range(300, 332), range(400, 412)):  # the device has nothing else then
            lab.serve([*new])
        found.append(lab.serve(prompt))
    assert found[0] == 2 and (found[1] == 4) == is_there


def test_a_running_branch_is_not_finished() -> None:
    lab = Lab()
    lab.turn(PARENT)
    lab.scheduler.add(make_request("open", ONE, max_tokens=9), 0.0)
    assert lab.step() == len(ONE) - 2 * SIZE
    lab.scheduler.add(make_request("next", NEXT, max_tokens=1), 0.0)
    lab.step()
    [parent] = lab.branches._ends.values()
    assert len(parent.branches) == 1 and not lab.branches._finished


@pytest.mark.parametrize("n", [1, 2])
def test_a_branch_whose_next_turn_waits_is_not_finished(n: int) -> None:
    """One row: the parent's next turn is computed first."""
    lab = Lab(num_rows=n)
    lab.turn(PARENT)
    lab.turn(ONE)
    lab.scheduler.add(make_request("next", NEXT, max_tokens=2), 0.0)
    waiting = make_request("waits", [*ONE, *TURN, 1], max_tokens=1, n=n)
    lab.scheduler.add(waiting, 0.0)
    lab.step()
    assert not lab.branches._finished
    while lab.scheduler.has_work:
        lab.step()
    assert not lab.branches._open
    lab.turn([*CONTEXT, 90])
    assert len(lab.branches._finished) == 2 + 4, "NEXT and ONE"


def test_a_turn_continues_a_request_that_ended_while_the_turn_waited() -> None:
    lab = Lab(num_rows=1)
    lab.scheduler.add(make_request("parent", PARENT, max_tokens=2), 0.0)
    lab.scheduler.add(make_request("one", ONE, max_tokens=2), 0.0)
    while lab.scheduler.has_work:
        lab.step()
    lab.turn(NEXT)
    assert len(lab.branches._finished) == 4


def test_edited_turns_are_branches_too() -> None:
    lab = Lab()
    lab.serve(ALIEN)
    lab.turn(PARENT)
    for first in (20, 40, 60):  # the same turn with other texts: only the last is current
        lab.turn([*CONTEXT, *range(first, first + 10)])
    assert len(lab.branches._finished) == 6
    lab.serve(NEW[:24])
    assert lab.serve(ALIEN) == 4


# ---- no branches -----------------------------------------------------------------------------

SYSTEM = list(range(70, 78))  # two blocks that several conversations share
FIRST, SECOND = ([*SYSTEM, *range(first, first + 15)] for first in (20, 40))


def short_turn(lab: Lab) -> None:
    lab.turn([*SYSTEM, 9])


def pinned(lab: Lab) -> None:
    pin = make_request("pin", SYSTEM, max_tokens=1)
    run(lab.scheduler, msgspec.structs.replace(pin, pin_s=0.0))


@pytest.mark.parametrize("before", [short_turn, pinned])
def test_conversations_that_share_a_system_prompt_are_not_branches(
    before: Callable[[Lab], None],
) -> None:
    lab = Lab()
    lab.serve(ALIEN)
    before(lab)
    lab.turn(FIRST)
    lab.turn(SECOND)
    assert not lab.branches._finished
    assert [len(turn.branches) for turn in lab.branches._ends.values()] == [0, 0]
    lab.serve(NEW[:24])  # evicts four blocks
    assert lab.turn([*FIRST, *TURN, 1]) == 2
    assert lab.serve(ALIEN) > SIZE and not lab.branches._open


def test_an_aborted_prompt_does_not_count_as_a_turn() -> None:
    lab = Lab()
    scheduler = lab.scheduler
    scheduler.add(make_request("first", NEW[:24], max_tokens=9), 0.0)
    scheduler.add(make_request("gone", [*SYSTEM, *range(300, 340)], max_tokens=9), 0.0)
    lab.step()  # the second prompt is computed in part
    scheduler.control(Abort("gone"), 0.0)
    assert not lab.branches._ends and [*lab.branches._open] == ["first"]


# ---- host memory -----------------------------------------------------------------------------


@both
def test_finished_branches_are_evicted_first_from_host_memory(
    extensions: tuple[str, ...], is_there: bool
) -> None:
    """Host memory has eight blocks: first the four of ALIEN, then four of the other prompts."""
    lab = Lab(8, extensions)
    lab.serve(ALIEN)
    lab.family()
    lab.serve(NEW)
    assert lab.serve(list(range(300, 332))) == 32
    found = lab.serve(ALIEN)
    assert (found == 4) == is_there


@pytest.mark.parametrize("num_stores", [1, 2])
def test_finished_blocks_that_stores_have_kept_leave_host_memory_first(num_stores: int) -> None:
    kv = KVManager((FULL,), (4,), SIZE, host_limits=(4,))
    branches, host = FinishedBranches(kv), kv.host_pools[0]
    assert kv.tier is not None
    names = [b"finished", b"other"]
    for name in names:
        block = kv.tier.allocate(0)
        assert block is not None
        kv.tier.keep_fetched(0, block, name)
    branches._finished[names[0]] = None
    borrowed = [kv.tier.borrow(0, names[0]) for _ in range(num_stores)]
    settled = [(0, name) for name in names]
    branches.end_step(SimpleNamespace(settled=settled), 0.0)  # type: ignore[arg-type]
    for block in borrowed:
        assert block is not None and branches._in_use
        kv.tier.release(0, block)
        branches.handlers()[Kept](Kept(0, 1, [True], 0, 0.0), 0.0)
    assert not branches._in_use
    assert host.evict() and host.lookup(names[0]) is None and host.lookup(names[1]) is not None


def test_the_number_of_remembered_names_is_bounded() -> None:
    lab = Lab(extensions=())
    branches = FinishedBranches(lab.kv, max_blocks=6)
    lab.scheduler.attach(branches)
    lab.family()
    assert branches._num_blocks <= 6 and len(branches._finished) <= 6
    assert sum(len(turn.digests) for turn in branches._ends.values()) == branches._num_blocks
    lab.scheduler.memory.reset(b"another", 0.0)
    assert not branches._ends and not branches._finished


# ---- random programs -------------------------------------------------------------------------


class SessionRules(TurnRules):
    """Turns that continue ended requests, some of them several times."""

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        return replace(super().configured(config), scheduler_extensions=OWN_EXTENSIONS)


class SessionsMachine(SessionRules):
    groups = (FULL, WINDOW)


class SessionsStoresMachine(SessionRules, StoresMachine):
    groups = (FULL, STATES)


@FEW
@pytest.mark.parametrize("machine", [SessionsMachine, SessionsStoresMachine])
def test_finished_branches_change_no_tokens(machine: type, max_examples: int) -> None:
    run_machine(machine, max_examples)


def test_a_request_that_is_admitted_again_finishes_no_branches() -> None:
    """Another request may have continued the same turn while it was preempted."""
    kv = KVManager((FULL,), (8,), SIZE)
    branches, hit = FinishedBranches(kv), KVBlocks(0, ([],))

    def sequence_of(name: str, *digests: bytes) -> Any:
        sequence = SimpleNamespace(
            request=SimpleNamespace(request_id=name), digests=list(digests), samples=True,
            watch=lambda _: None, group=None, num_prompt_tokens=0,
            blocks=SimpleNamespace(num_indexed=len(digests)),
        )  # fmt: skip
        branches.enter(sequence, 0.0)
        branches.begin(sequence, hit, 0.0)
        return sequence

    branches.leave(sequence_of("turn", b"1"), "stop", 0.0)
    preempted = sequence_of("preempted", b"1", b"2")
    branches.leave(sequence_of("other", b"1", b"3"), "stop", 0.0)
    branches.begin(preempted, hit, 0.0)
    assert not branches._finished
    sequence_of("next", b"1", b"4")
    assert list(branches._finished) == [b"3"]
