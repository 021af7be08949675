"""Named partial blocks at the end of a turn, which the next turn reuses, in each kind of memory and
under random programs.

Covers `scheduler/reuse/partial_blocks.py`.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from quire.base.errors import RequestError
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.base.settings.config import SchedulerConfig
from quire.kv.digest import extend_digests, root_digest
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.reuse import partial_blocks
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CHUNKED, CacheGroup
from tests.scheduler.test_guessing_machine import GuessingMachine
from tests.scheduler.test_held import HeldBench
from tests.scheduler.test_held_machine import HeldRules
from tests.scheduler.test_pins import copies
from tests.scheduler.test_scheduler_machine import (
    FULL,
    STATES,
    WINDOW,
    MixedStoresMachine,
    SchedulerMachine,
    StoresMachine,
)
from tests.scheduler.test_stores import OTHER, PROMPT, Lab
from tests.support.scheduler.fake_device import (
    Curse,
    candidates_of,
    expected_tokens,
    make_request,
)
from tests.support.scheduler.fake_stores import BLOCK
from tests.support.scheduler.pinning_core import Bench
from tests.support.scheduler.state_machines import FEW, run_machine

MAX_PROMPT = 34
TURN = PROMPT[:10]  # two blocks of four tokens, and half a block


def begin(lab: Lab, prompt: list[int] = TURN) -> list[int]:
    """Serve a turn, and return its tokens: 12, of which 11 are computed."""
    answer = lab.generate(prompt)
    assert isinstance(answer, list)
    return [*prompt, *answer]


def hit_of(lab: Lab, prompt: list[int]) -> int:
    """Return the length of the prefix hit of a request, whose answer must be right."""
    request, found, tokens = lab.add(prompt), [], list[int]()
    while not tokens or lab.scheduler.has_work:
        lab.answer()
        for update in lab.step():
            tokens += update.token_ids
            found.append(update.num_cached_tokens)
    assert tokens == expected_tokens(request, 40)
    return max(num for num in found if num is not None)


@pytest.mark.parametrize(("reuses", "num_tokens"), [(True, 11), (False, 8)])
def test_the_next_turn_begins_after_all_computed_tokens(reuses: bool, num_tokens: int) -> None:
    lab = Lab(reuses_partial=reuses)
    tokens = begin(lab)
    assert hit_of(lab, [*tokens, 5, 6, 7]) == num_tokens


def test_a_prompt_that_diverges_within_the_partial_block_does_not_hit_it() -> None:
    lab = Lab(reuses_partial=True)
    tokens = begin(lab)
    assert hit_of(lab, [*tokens[:10], 49, 48, 47]) == 8
    assert hit_of(lab, tokens[:11]) == 8, "one token must be left to compute"


def name_of(tokens: list[int]) -> bytes:
    """Return the name of the block of three tokens after the first two blocks."""
    blocks: list[bytes] = []
    extend_digests(blocks, root_digest(b""), np.array(tokens, np.int32), BLOCK, 2)
    last: list[bytes] = []
    extend_digests(last, blocks[1], np.array(tokens[8:11], np.int32), 3, 1)
    return last[0]


def test_host_memory_keeps_the_partial_block() -> None:
    lab = Lab(num_stores=0, reuses_partial=True)
    tokens = begin(lab)
    lab.generate([*OTHER[::-1], *OTHER[:17]])  # needs one block more than are free
    assert lab.kv.device_block(0, name_of(tokens)) is None
    assert hit_of(lab, [*tokens, 5, 6, 7]) == 11


def test_a_store_keeps_the_partial_block() -> None:
    lab = Lab(reuses_partial=True)
    tokens = begin(lab)
    for _ in range(4):
        lab.evict()
    assert not lab.kv.is_cached(0, name_of(tokens))
    assert (0, name_of(tokens)) in lab.stores.kept[0]
    assert hit_of(lab, [*tokens, 5, 6, 7]) == 11


def test_a_failed_request_drops_the_blocks_of_its_prefix_hit() -> None:
    lab = Lab(reuses_partial=True)
    tokens = begin(lab)
    number = lab.num_requests + 1
    lab.device.curses[number] = Curse(position=13, raises=False)
    assert isinstance(lab.generate([*tokens, 5, 6], num=4), str)
    assert hit_of(lab, [*tokens, 5, 6, 7]) == 0


def test_the_number_of_remembered_lengths_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_blocks, "MAX_REMEMBERED", 1)
    lab = Lab(reuses_partial=True)
    first, second = begin(lab), begin(lab, PROMPT[10:])
    assert hit_of(lab, [*second, 5]) == 11
    assert hit_of(lab, [*first, 5]) == 8


def test_a_load_of_the_same_plan_does_not_overwrite_a_block_that_is_copied() -> None:
    """Loads precede copies. The load would take the block of the evicted retained request."""
    bench = HeldBench(num_blocks=8, num_host_blocks=30, reuse_partial_blocks=True)
    bench.add("early", OTHER[:11], max_tokens=3)
    bench.finish()
    bench.add("large", PROMPT[:10] * 3, max_tokens=1)  # moves the blocks of `early` to host memory
    bench.finish()
    held = bench.keep()
    assert held.blocks is not None
    last = held.blocks.tables[0].blocks[3]
    copying = bench.add("copying", held.tokens.tolist(), max_tokens=1)
    loading = bench.add(
        "loading", [*OTHER[:11], *bench.output["early"][0], 1, 2], max_tokens=1
    )  # three blocks are free, and it needs four
    bench.step()
    assert [source for _, source, _ in copies(bench.plans[-1])] == [last] and held.blocks is None
    bench.finish()
    bench.assert_right(copying, loading)


@pytest.mark.parametrize(("num", "found"), [(5, 14), (6, 12)])
def test_a_block_that_a_chunked_group_has_dropped_gets_no_name(num: int, found: int) -> None:
    """The steps in flight begin the chunk after the first 16 tokens. With 6 tokens of output, 15 of
    16 tokens are computed when the stop token is known."""
    chunks = CacheGroup(CHUNKED, (1,), 1, 8, window=16)
    bench = Bench(40, (FULL, chunks), reuse_partial_blocks=True, pipeline_depth=3)
    output = expected_tokens(make_request("", TURN, max_tokens=num), 40)
    request = bench.add("first", TURN, max_tokens=20, stops=output[-1:])
    while bench.scheduler.has_work:
        while len(bench.scheduler.planner.in_flight) < 3 and bench.core.plan():
            pass
        bench.step()
    assert bench.output["first"][0] == expected_tokens(request, 40) == output
    again = bench.add("again", [*TURN, *output, 1, 2])
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == found
    bench.finish()
    bench.assert_right(again)


def test_a_scored_prompt_names_its_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(reuse_partial_blocks=True)
    run = bench.device.run

    def run_scored(plan: Plan, masks: MaskPromise | None) -> StepResult:
        scores = [candidates_of(TURN[:i], 1) for i in range(1, len(TURN))]
        found = {0: scores} if plan.started else {}
        return msgspec.structs.replace(run(plan, masks), prompt_candidates=found)

    monkeypatch.setattr(bench.device, "run", run_scored)
    scored = bench.add("scored", TURN, prompt_logprobs=0)
    bench.finish()
    monkeypatch.undo()
    again = bench.add("again", [*TURN, *bench.output["scored"][0], 1, 2])
    bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens == len(TURN) + 5
    bench.finish()
    bench.assert_right(scored, again)


def test_partial_blocks_are_not_reused_with_state_groups() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, reuse_partial_blocks=True)
    for groups, is_there in (((FULL,), True), ((FULL, STATES), False)):
        kv = KVManager(groups, [12] * len(groups), 4)
        scheduler = Scheduler(Memory(kv, 8), config, 40)
        kinds = [type(each) for each in scheduler.memory.sources]
        assert (partial_blocks.PartialBlocks in kinds) == is_there


class TurnRules(SchedulerMachine):
    """Adds turns of conversations to a machine of any kind."""

    def configured(self, config: SchedulerConfig) -> SchedulerConfig:
        return replace(super().configured(config), reuse_partial_blocks=True)

    @rule(
        pick=st.integers(0, 50),
        added=st.integers(0, 5),
        max_tokens=st.integers(2, 7),
        cursed_at=st.sampled_from([None, None, None, 20]),
    )
    def next_turn(self, pick, added, max_tokens, cursed_at) -> None:
        """Resend an ended request with its answer, and some more tokens."""
        ended = [name for name, _ in sorted(self.ended) if self.reason.get(name) != "error"]
        if not ended:
            return
        before = self.requests[ended[pick % len(ended)]]
        number = len(self.requests)
        more = np.random.default_rng(number).integers(0, 50, added).tolist()
        known = before.prompt_token_ids + self.output[before.request_id, 0]
        name, prompt = f"r{number}", (known + more)[:MAX_PROMPT]
        request = make_request(
            name, prompt, max_tokens=max_tokens, salt=before.cache_salt, seed=number
        )
        try:
            self.core.add(self.prepared(request))
        except RequestError:
            assert self.pins, "a turn is refused only next to pins"
            return
        if cursed_at is not None:
            self.device.curses[number] = Curse(cursed_at, raises=False)
        self.requests[name], self.output[name, 0] = self.prepared(request), []


class TurnMachine(TurnRules):
    groups = (FULL,)


class MixedTurnMachine(TurnRules):
    groups = (FULL, WINDOW)


class StoresTurnMachine(TurnRules, StoresMachine):
    pass


class MixedStoresTurnMachine(TurnRules, MixedStoresMachine):
    pass


class HeldTurnMachine(TurnRules, HeldRules):
    pass


class GuessingTurnMachine(TurnRules, GuessingMachine):
    pass


@FEW
@pytest.mark.parametrize(
    "machine",
    [
        MixedTurnMachine,
        StoresTurnMachine,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (TurnMachine, MixedStoresTurnMachine, HeldTurnMachine, GuessingTurnMachine)
        ),
    ],
)
def test_each_turn_gets_the_answer_of_a_request_without_a_cache(
    machine: type, max_examples: int
) -> None:
    run_machine(machine, max_examples)


def test_sequences_of_groups_and_with_marks_are_not_watched() -> None:
    kv = KVManager((FULL,), (8,), BLOCK)
    partial, watched = partial_blocks.PartialBlocks(Memory(kv, 16)), list[str]()
    cases = {"plain": ((), None), "group": ((), object()), "marks": (((0, bytes(32)),), None)}
    for name, (marks, group) in cases.items():
        sequence: Any = SimpleNamespace(
            marks=marks, group=group, watch=lambda _, name=name: watched.append(name)
        )
        partial.enter(sequence, 0.0)
    assert watched == ["plain"]
