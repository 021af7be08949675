"""Branches that no later turn continues leave the cache first, and no answer changes.

Covers `scheduler/policy/extensions.py`.
"""

from dataclasses import replace

import numpy as np
import pytest

from quire.base.plan import StepResult
from quire.base.plugins import OWN_EXTENSIONS
from quire.base.settings.config import SchedulerConfig
from quire.kv.manager import KVManager
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
ANSWER = 7  # the token of all answers (`run`)


class Lab:
    """A scheduler with 16 blocks of 4 tokens, and `num_host` more in host memory."""

    def __init__(self, num_host: int = 0, extensions: tuple[str, ...] = OWN_EXTENSIONS) -> None:
        limits = (num_host,) if num_host else None
        self.kv = KVManager((FULL,), (16,), SIZE, host_limits=limits)
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=64, scheduler_extensions=extensions
        )
        self.scheduler = Scheduler(Memory(self.kv, 64, watermark=0.0), config, 64)
        self.num = 0

    def turn(self, prompt: list[int], num_new: int = 0) -> int:
        """Serve a turn. Return the number of tokens that it computed."""
        self.num += 1
        num = run(self.scheduler, make_request(f"r{self.num}", prompt, max_tokens=1))
        self.scheduler.check_invariants()
        return num

    def family(self) -> None:
        """Serve a parent's turn, two subagents of four blocks each, and the parent's next turn."""
        self.turn(PARENT)
        self.turn(ONE)
        self.turn(OTHER)
        assert self.turn(NEXT) == len(NEXT) - len(PARENT)

    @property
    def branches(self) -> FinishedBranches:
        [found] = [each for each in self.scheduler.features if isinstance(each, FinishedBranches)]
        return found


ALIEN = list(range(100, 116))  # another conversation, of four blocks
PARENT = list(range(8))
CONTEXT = [*PARENT, ANSWER]
ONE, OTHER = ([*CONTEXT, *range(first, first + 15)] for first in (20, 40))
NEXT = [*CONTEXT, *range(60, 67)]
NEW = list(range(200, 232))  # eight blocks


def test_the_settings_know_the_names_of_quires_own_extensions() -> None:
    assert tuple(BUILT_IN) == OWN_EXTENSIONS


@pytest.mark.parametrize(("extensions", "num_computed"), [(OWN_EXTENSIONS, 4), ((), 16)])
def test_subagents_leave_before_a_waiting_conversation(
    extensions: tuple[str, ...], num_computed: int
) -> None:
    """Without the extension, the conversation was used longest ago."""
    lab = Lab(extensions=extensions)
    lab.turn(ALIEN)
    lab.family()
    assert lab.kv.pools[0].num_cached == 16
    assert lab.turn(NEW) == 32
    assert lab.turn(ALIEN) == num_computed


def test_the_parent_stays() -> None:
    lab = Lab()
    lab.family()
    lab.turn(NEW)
    assert lab.turn([*NEXT, ANSWER, 1, 2, 3]) == 4


def test_a_branch_that_is_continued_after_all_is_no_longer_finished() -> None:
    """Its blocks are used again, so the other conversation leaves first."""
    lab = Lab()
    lab.turn(ALIEN)
    lab.family()
    assert lab.turn([*ONE, ANSWER, 1, 2, 3]) == 4
    lab.turn(NEW[:20])  # one block for the answer's turn and five here: OTHER's four, and ALIEN's
    assert lab.turn([*ONE, ANSWER, 1, 2, 3, ANSWER, 5]) <= 6


def test_an_open_branch_is_not_finished() -> None:
    lab = Lab()
    lab.turn(PARENT)
    scheduler = lab.scheduler
    scheduler.add(make_request("open", ONE, max_tokens=9), 0.0)
    plan = scheduler.schedule(0.0).plan
    assert plan is not None and plan.num_scheduled_tokens == len(ONE) - len(PARENT)
    result = StepResult(plan.step_id, np.full((1, 1), ANSWER, np.int32), np.ones(1, np.int32))
    scheduler.update(result, 0.0)
    branches = lab.branches
    scheduler.add(make_request("next", NEXT, max_tokens=1), 0.0)
    scheduler.schedule(0.0)
    [parent] = branches._ends.values()
    assert len(parent.branches) == 2 and not branches._finished


def test_edited_turns_are_branches_too() -> None:
    lab = Lab()
    lab.turn(ALIEN)
    lab.turn(PARENT)
    for first in (20, 40, 60):  # the same turn with other texts: only the last counts
        lab.turn([*CONTEXT, *range(first, first + 11)])
    assert len(lab.branches._finished) == 6
    lab.turn(NEW[:24])
    assert lab.turn(ALIEN) == 4


@pytest.mark.parametrize(("extensions", "is_there"), [(OWN_EXTENSIONS, True), ((), False)])
def test_what_the_device_evicts_of_them_leaves_host_memory_first(
    extensions: tuple[str, ...], is_there: bool
) -> None:
    """Host memory has eight blocks: the alien's four, which came first, and others' four."""
    lab = Lab(8, extensions)
    lab.turn(ALIEN)
    lab.family()
    lab.turn(NEW)
    assert lab.turn(list(range(300, 332))) == 32
    found = lab.turn(ALIEN)
    assert (found == 4) == is_there


def test_few_names_are_remembered() -> None:
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
