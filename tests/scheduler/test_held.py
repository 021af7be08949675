"""Retained requests, checked by block numbers: sharing, copying, eviction, remaining blocks;
windows, states, time, failures. The device checks that each token sees the right keys."""

from typing import Any

import msgspec
import pytest

from quire.base.messages import Abort, Fork, Hold, Request, ResetPrefixCache, Rewind
from quire.base.plan import MoveKind
from quire.scheduler.reuse.held import Held, _have_same_names
from quire.scheduler.views import RetainedView
from quire.spec.cache_group import STATE, CacheGroup
from tests.scheduler.test_pins import copies
from tests.support.calls import counted_calls
from tests.support.scheduler.fake_device import Curse, expected_tokens, make_request
from tests.support.scheduler.pinning_core import FULL, MAX_LEN, WINDOW, Bench

STATES = CacheGroup(STATE, (2,), state_size=8)
PROMPT = list(range(10))  # with 6 output tokens: 15 computed, the fourth block is not full


class HeldBench(Bench):
    def keep(self, name: str = "a", prompt: list[int] = PROMPT, **more: Any) -> Held:
        """Serve a request to its end. Return what is retained of it."""
        request = make_request(name, prompt, **({"max_tokens": 6} | more))
        self._send(msgspec.structs.replace(request, keep_s=100.0))
        self.finish()
        self.assert_right(request)
        return self.held_of(name)

    def fork(
        self,
        held: Held,
        at: int,
        added: tuple[int, ...] = (),
        keep_s: float = 0.0,
        **more: Any,
    ) -> Request:
        tokens = [*held.tokens[:at].tolist(), *added]
        name = f"fork {len(self.output)}"
        request = make_request(name, tokens, **({"max_tokens": 6} | more))
        fork = Fork(held.request.request_id, held.index, at, more.get("takes_over", False))
        request = msgspec.structs.replace(request, fork=fork, keep_s=keep_s)
        self._send(request)
        return request

    def held_of(self, name: str, index: int = 0) -> Held:
        return self.scheduler.retained.by_id[name][index]

    def refs(self, held: Held) -> list[int]:
        assert held.blocks is not None
        return [self.kv.pools[0].num_refs(block) for block in held.blocks.tables[0].blocks]

    def let_go(self) -> None:
        for one in self.scheduler.held(0.0):
            self.core.control(Hold(one.id, 0.0))
        assert self.num_used == [0] * len(self.kv.pools)


def test_a_fork_shares_full_blocks_and_copies_the_last(  # P fig. 8
) -> None:
    bench = HeldBench(caching=False)
    held = bench.keep()
    assert held.num_computed == 15 and bench.refs(held) == [1, 1, 1, 1]
    request = bench.fork(held, 15)
    bench.step()
    [plan] = bench.plans[-1:]
    assert held.blocks is not None
    [(group, source, copy)] = copies(plan)
    assert (group, source) == (0, held.blocks.tables[0].blocks[3]) and copy != source
    assert plan.num_tokens.tolist() == [1], "one token is computed, whatever the index says"
    assert bench.refs(held) == [2, 2, 2, 1], "2 -> 1: the copy is the fork's own"
    bench.finish()
    bench.assert_right(request)
    assert bench.refs(held) == [1, 1, 1, 1]
    bench.let_go()


def test_a_fork_with_n_sequences_allocates_at_most_n_blocks() -> None:
    bench = HeldBench()
    held = bench.keep()
    before = bench.num_used[0]
    request = bench.fork(held, 15, n=4, max_tokens=2)
    bench.step()
    bench.step()
    assert bench.num_used[0] - before <= 4
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


@pytest.mark.parametrize("at", [1, 2, 3, 4, 8, 14, 15, 16])
def test_a_fork_may_begin_at_any_token(at: int) -> None:
    bench = HeldBench(caching=False)
    held = bench.keep()
    request = bench.fork(held, at)
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [max(1, at - min(15, at - 1))]
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


def test_forking_a_running_request_copies_its_last_block_for_both_rows() -> None:
    """The branch holds the shared block until the fork has its copy; then the block is freed."""
    bench = HeldBench(caching=False)
    running = bench.add("running", PROMPT, max_tokens=30)
    for _ in range(5):
        bench.step()
    tokens = bench.sequence("running").known_tokens.tolist()
    fork = make_request("fork", tokens, max_tokens=8)
    bench._send(msgspec.structs.replace(fork, fork=Fork("running", 0, len(tokens))))
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [1, 1]
    assert len(copies(bench.plans[-1])) == 2
    assert bench.num_used == [len({copied for _, _, copied in copies(bench.plans[-1])}) + 3]
    bench.finish()
    bench.assert_right(running, fork)
    bench.let_go()


def test_a_request_without_a_sampled_token_shares_no_blocks_with_a_fork() -> None:
    bench = HeldBench(caching=False, max_num_batched_tokens=4)
    running = bench.add("running", PROMPT)
    bench.step()
    fork = make_request("fork", PROMPT, max_tokens=8)
    bench._send(msgspec.structs.replace(fork, fork=Fork("running", 0, len(PROMPT))))
    assert not bench.scheduler.retained.branches
    bench.finish()
    bench.assert_right(running, fork)


def test_a_fork_keeps_its_blocks_if_its_source_is_rewound_and_released() -> None:
    bench = HeldBench(caching=False)
    held = bench.keep()
    request = bench.fork(held, 15)
    bench.core.control(Rewind("a", 0, 2))
    bench.core.control(Hold("a", 0.0))
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [1]
    bench.finish()
    bench.assert_right(request)
    assert bench.num_used == [0]


def test_an_aborted_fork_leaves_no_branch() -> None:
    bench = HeldBench()
    held = bench.keep()
    request = bench.fork(held, 15)
    bench.core.control(Abort(request.request_id))
    bench.step()
    assert not bench.scheduler.retained.branches
    bench.let_go()


def test_a_retained_request_that_was_never_forked_is_evicted_first() -> None:
    bench = HeldBench(num_blocks=12, caching=False)
    first, second = bench.keep("a"), bench.keep("b", [*PROMPT[1:], 0])
    bench.fork(first, 15, max_tokens=1)
    bench.finish()
    assert bench.scheduler.retained.standing == [second, first]
    request = bench.add("large", list(range(20, 40)), max_tokens=3)  # 6 blocks, and 4 are free
    bench.finish()
    bench.assert_right(request)
    assert second.blocks is None and first.blocks is not None
    assert second.tokens.tolist()[:10] == [*PROMPT[1:], 0]
    again = bench.fork(second, 16)
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [16], "all is computed again"
    bench.finish()
    bench.assert_right(again)
    assert bench.num_preempted == 0
    bench.let_go()


def test_evict_one_takes_retained_requests_first_and_the_spared_branch_last() -> None:
    bench = HeldBench(caching=False, max_num_seqs=1)
    held, holds = bench.keep(), bench.scheduler.retained
    first, second = [bench.fork(held, at).request_id for at in (15, 14)]
    spared = bench.sequence(first)
    for left in ([first, second], [first], []):
        assert holds.evict_one(spared) and list(holds.branches) == left
    assert held.blocks is None and bench.num_used == [0]
    assert not holds.evict_one(spared)


def test_full_blocks_of_an_evicted_retained_request_are_found_by_name() -> None:
    bench = HeldBench()
    held = bench.keep()
    bench.scheduler.memory.evict_one()
    assert held.blocks is None and bench.num_used == [0]
    request = bench.fork(held, 16)
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [16 - 12]
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


def test_retained_requests_are_evicted_before_a_row_is_preempted() -> None:
    bench = HeldBench(num_blocks=10, caching=False)
    held = bench.keep()
    request = bench.add("long", list(range(20, 30)), max_tokens=28)  # 10 blocks
    bench.finish()
    bench.assert_right(request)
    assert held.blocks is None and bench.num_preempted == 0
    bench.let_go()


def test_the_view_counts_retained_sequences_and_their_tokens() -> None:
    bench = HeldBench()
    bench.keep(n=2)
    bench.keep("b", max_tokens=3)
    assert bench.core.view().held == RetainedView(3, 2 * 16 + 13)
    bench.core.control(Rewind("b", 0, 4))
    bench.core.control(Hold("a", 0.0))
    assert bench.core.view().held == RetainedView(1, 4)
    bench.let_go()
    assert bench.core.view().held == RetainedView(0, 0)


def test_a_retained_request_is_released_when_its_time_is_over() -> None:
    bench = HeldBench()
    bench.keep()
    bench.clock.advance(99.0)
    assert bench.core.rest_s() == pytest.approx(1.0)
    bench.core.control(Hold("a", 3.0))
    assert bench.core.rest_s() == pytest.approx(3.0)
    bench.clock.advance(3.0)
    assert bench.core.rest_s() == 0.0
    bench.step()
    assert not bench.scheduler.retained.by_id and bench.num_used == [0]
    assert bench.core.rest_s() is None


def test_a_fork_that_takes_over_replaces_its_source_at_its_end() -> None:
    bench = HeldBench()
    held = bench.keep()
    tokens = held.tokens.tolist()
    request = make_request("b", [*tokens, 7], max_tokens=3)
    fork = Fork("a", 0, len(tokens), takes_over=True)
    bench._send(msgspec.structs.replace(request, keep_s=9.0, fork=fork))
    assert set(bench.scheduler.retained.by_id) == {"a"}
    bench.finish()
    assert set(bench.scheduler.retained.by_id) == {"b"}
    bench.let_go()


def test_rewinding_frees_blocks() -> None:
    bench = HeldBench(caching=False)
    held = bench.keep()
    bench.core.control(Rewind("a", 0, 7))
    assert held.blocks is not None and bench.num_used == [2] and held.num_computed == 7
    for wrong in (0, 7, 100, -1):
        bench.core.control(Rewind("a", 0, wrong))
    assert len(held.tokens) == 7
    request = bench.fork(held, 7, added=(9, 9))
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [2]
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


def test_only_its_tenant_may_rewind_or_release_a_retained_request() -> None:
    bench = HeldBench()
    held = bench.keep(tenant="one")
    for tenant, left in (("two", 16), ("one", 5)):
        bench.core.control(Rewind("a", 0, 5, tenant))
        assert len(held.tokens) == left
        bench.core.control(Hold("a", 0.0, tenant))
        assert ("a" in bench.scheduler.retained.by_id) == (tenant == "two")
    assert bench.num_used == [0]


def test_a_fork_shares_blocks_of_a_window_only_at_the_end_of_its_source() -> None:
    """Before the end, the window's blocks are freed, so the fork computes all tokens again."""
    bench = HeldBench(groups=(WINDOW,), caching=False)
    held = bench.keep(prompt=list(range(20)))
    for at, num in ((25, 1), (26, 1), (12, 12)):
        request = bench.fork(held, at)
        bench.step()
        assert bench.plans[-1].num_tokens.tolist() == [num]
        bench.finish()
        bench.assert_right(request)
    bench.core.control(Rewind("a", 0, 12))
    request = bench.fork(held, 12)
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


def test_remaining_tokens_ignore_a_branch_that_the_fork_cannot_use() -> None:
    """The branch has the last window of its source, and the fork begins before that window."""
    bench = HeldBench(groups=(WINDOW,), caching=False, max_num_seqs=1)
    held = bench.keep(prompt=list(range(20)))
    for at, num_lacking in ((25, 1), (12, 12)):
        request = bench.fork(held, at)
        sequence = bench.sequence(request.request_id)
        remaining = bench.scheduler.progress.remaining
        assert remaining(sequence) == num_lacking
        bench.add(f"beside {at}", [45, 46, 47])
        assert remaining(bench.sequence(f"beside {at}")) == 3, "it has no branch"
        bench.finish()
    bench.let_go()


def test_find_source_returns_any_sequence_of_a_retained_request() -> None:
    bench = HeldBench()
    bench.keep(n=2)
    find = bench.scheduler.retained.find_source
    assert [find(Fork("a", index, 5)) for index in (0, 1)] == [
        bench.held_of("a", index) for index in (0, 1)
    ]
    assert find(Fork("a", -1, 5)) is bench.held_of("a") and find(Fork("a", 2, 5)) is None


def test_a_fork_resumes_from_the_final_state_or_from_a_stored_one() -> None:
    bench = HeldBench(groups=(FULL, STATES))
    held = bench.keep(prompt=list(range(30)), max_tokens=8)
    assert held.num_computed == 37
    for at, most in ((38, 1), (37, 37), (30, 30)):
        request = bench.fork(held, at)
        bench.step()
        assert 1 <= bench.plans[-1].num_tokens.tolist()[0] <= most
        bench.finish()
        bench.assert_right(request)
    bench.let_go()


def test_a_cache_reset_frees_retained_blocks_and_keeps_the_tokens() -> None:
    bench = HeldBench()
    held = bench.keep()
    bench.core.control(ResetPrefixCache("new"))
    assert held.blocks is None and bench.num_used == [0] and len(held.tokens) == 16
    request = bench.fork(held, 16)
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [16]
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


def test_a_failed_fork_drops_the_blocks_of_its_source() -> None:
    """Any of the shared tokens may have caused the error."""
    bench = HeldBench()
    held = bench.keep()
    bench.device.curses[77] = Curse(15, raises=True)
    bad = bench.fork(held, 16, seed=77)
    bench.finish()
    assert bench.reason[bad.request_id] == "error" and held.blocks is None
    request = bench.fork(held, 16)
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [16], "nor is it found by name"
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


def test_a_fork_may_fail_after_its_source_was_released() -> None:
    bench = HeldBench()
    held = bench.keep()
    bench.device.curses[77] = Curse(15, raises=True)
    bad = bench.fork(held, 16, seed=77)
    bench.core.control(Hold("a", 0.0))
    bench.finish()
    assert bench.reason[bad.request_id] == "error" and bench.num_used == [0]


def test_a_fork_shares_blocks_with_its_source_and_not_with_an_equal_pin() -> None:
    bench = HeldBench(caching=False)
    bench.pin("pin", PROMPT[:8])
    held = bench.keep(prompt=PROMPT[:8])
    bench.fork(held, 8, added=(7,))
    [fork] = bench.scheduler.lifecycle.sequences.values()
    bench.step()
    assert fork.report is not None and (fork.report.held, fork.report.pinned) == (8, 0)
    bench.finish()


def test_a_failed_fork_drops_the_blocks_of_all_its_ancestors() -> None:
    """The first request loses its blocks too, as the second one shares them."""
    bench = HeldBench()
    first = bench.keep()
    between = bench.fork(first, 16, keep_s=60.0)
    bench.finish()
    other = bench.keep("b", PROMPT[::-1])
    held = bench.held_of(between.request_id)
    assert first.blocks is not None and held.blocks is not None
    bench.device.curses[77] = Curse(len(held.tokens) - 1, raises=True)
    bad = bench.fork(held, len(held.tokens), seed=77)
    bench.finish()
    assert bench.reason[bad.request_id] == "error"
    assert first.blocks is None and held.blocks is None and other.blocks is not None
    request = bench.fork(first, 16)
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_a_stopped_request_is_retained_and_an_aborted_one_is_not(reason: str) -> None:
    bench = HeldBench()
    request = make_request("a", PROMPT, max_tokens=30)
    bench._send(msgspec.structs.replace(request, keep_s=9.0))
    for _ in range(5):
        bench.step()
    bench.core.control(Abort("a", reason))
    bench.step()
    if reason == "abort":
        assert not bench.scheduler.retained.by_id and bench.num_used == [0]
        return
    held = bench.held_of("a")
    assert held.tokens.tolist() == PROMPT + bench.output["a"][0]
    bench.let_go()


def test_a_fork_begins_with_the_block_names_of_its_source() -> None:
    bench = HeldBench()
    held = bench.keep()
    request = bench.fork(held, 13, added=(7,))
    assert bench.sequence(request.request_id).digests == held.digests and len(held.digests) == 3
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


def test_block_names_from_before_a_reset_are_not_passed_to_a_fork() -> None:
    """A request that ran during the reset has no block names, but a fork still shares blocks."""
    bench = HeldBench()
    bench.add("a", PROMPT, max_tokens=12)
    for _ in range(4):
        bench.step()
    bench.core.control(Hold("a", 50.0))
    bench.core.control(ResetPrefixCache("new"))
    bench.finish()
    held = bench.held_of("a")
    assert held.digests == [] and held.blocks is not None
    request = bench.fork(held, 22)
    other = bench.add("other", held.tokens.tolist())
    bench.finish()
    bench.assert_right(request, other)
    bench.let_go()


def test_beams_are_not_retained() -> None:
    bench = HeldBench()
    request = make_request("a", PROMPT, max_tokens=4, use_beam_search=True, n=2, temperature=0.0)
    bench._send(request)
    bench.step()
    bench.core.control(Hold("a", 9.0))
    bench.finish()
    assert not bench.scheduler.held(0.0) and bench.num_used == [0]


def test_an_evicted_block_is_copied_before_a_load_overwrites_it() -> None:
    """A row copies the block that it shares with a retained request. Then that request is evicted
    for a prompt whose blocks are loaded. A step loads before it copies, so the block is free only
    in the next plan."""
    bench = HeldBench(num_blocks=6, num_host_blocks=6)
    loaded = list(range(30, 39))
    bench.add("loaded", loaded, max_tokens=1)
    bench.finish()
    bench.add("evicts", list(range(21)), max_tokens=1)
    bench.finish()
    pair = make_request("pair", PROMPT, max_tokens=6, n=2)
    bench._send(msgspec.structs.replace(pair, keep_s=100.0))
    bench.step()
    bench.core.control(Abort("pair", "stop", 0))
    held = bench.held_of("pair")
    assert bench.refs(held) == [2, 2, 2]
    again = bench.add("again", loaded, max_tokens=6)
    bench.step()
    assert held.blocks is None, "it is evicted"
    assert [move.kind for move in bench.plans[-1].moves if move.kind is not MoveKind.SWAP_OUT] == [
        MoveKind.COPY
    ]
    bench.step()
    assert MoveKind.LOAD in [move.kind for move in bench.plans[-1].moves]
    bench.finish()
    bench.assert_right(again)
    assert bench.output["pair"][1] == expected_tokens(pair, MAX_LEN)


def test_a_waiting_fork_shares_no_blocks_of_a_source_that_fails() -> None:
    bench = HeldBench(caching=False, max_num_seqs=1)
    bench.add("fails", PROMPT, max_tokens=30, seed=1)
    for _ in range(3):
        bench.step()
    tokens = bench.sequence("fails").known_tokens.tolist()
    bench.device.curses[bench.sequence("fails").request.seed] = Curse(len(tokens), raises=False)
    fork = make_request("fork", tokens, max_tokens=8)
    bench._send(msgspec.structs.replace(fork, fork=Fork("fails", 0, len(tokens))))
    assert bench.scheduler.retained.branches
    while "fails" not in bench.reason:
        bench.step()
    assert bench.reason["fails"] == "error" and not bench.scheduler.retained.branches
    bench.step()
    assert bench.plans[-1].num_tokens.tolist() == [len(tokens)], "all of it is computed"
    bench.finish()
    bench.assert_right(fork)
    bench.let_go()


def test_rewinding_leaves_at_least_one_token_and_names_of_full_blocks() -> None:
    bench = HeldBench()
    held = bench.keep()
    assert (held.num_computed, len(held.digests)) == (15, 3)
    for left, names in ((12, 3), (9, 2), (8, 2), (7, 1), (1, 0)):
        bench.core.control(Rewind("a", 0, left))
        assert (len(held.tokens), len(held.digests)) == (left, names)
        assert held.num_prompt_tokens == min(left, len(PROMPT))
    bench.let_go()


def test_a_retained_request_ends_at_its_known_tokens() -> None:
    """A step in flight may still write the slots after them."""
    bench = HeldBench(caching=False, pipeline_depth=2)
    request = make_request("a", PROMPT, max_tokens=30)
    bench._send(msgspec.structs.replace(request, keep_s=9.0))
    for _ in range(5):
        bench.step()
    bench.core.plan()
    assert bench.core.num_in_flight > 0
    bench.core.control(Abort("a", "stop"))
    held = bench.held_of("a")
    assert held.blocks is not None
    assert [table.num_tokens for table in held.blocks.tables] == [held.num_computed]
    assert held.num_computed == len(held.tokens) - 1
    bench.finish()
    bench.let_go()


def test_rewinding_to_before_a_window_truncates_no_cache_group() -> None:
    """The full group has these tokens and the window group does not: no fork can resume there."""
    bench = HeldBench(groups=(FULL, WINDOW), caching=False)
    held = bench.keep(prompt=list(range(20)))
    assert held.blocks is not None
    before = [list(table.blocks) for table in held.blocks.tables]
    bench.core.control(Rewind("a", 0, 12))
    assert len(held.tokens) == 12
    if held.blocks is not None:
        assert [list(table.blocks) for table in held.blocks.tables] == before
    request = bench.fork(held, 12)
    bench.finish()
    bench.assert_right(request)
    bench.let_go()


def test_num_evictable_is_the_exact_number_of_blocks_that_evictions_free() -> None:
    """Blocks shared with a row do not count; blocks that two branches share do."""
    bench = HeldBench(num_blocks=40, caching=False)
    memory, held = bench.scheduler.memory, bench.keep()
    assert held.blocks is not None and bench.kv.num_evictable() == [4]
    bench.fork(held, 12, keep_s=50.0)
    assert bench.kv.num_evictable() == [4], "the fork's branch may be evicted, too"
    bench.step()
    assert bench.kv.num_evictable() == [2], "two full blocks are shared with a row"
    assert bench.kv.num_evictable([held.blocks.tables[0].blocks]) == [0]
    bench.finish()
    num_used = bench.num_used[0]
    assert bench.kv.num_evictable() == [num_used] and num_used > 4
    assert memory.could_fit([40]) and not memory.could_fit([41])
    bench.core.control(Rewind("a", 0, 5))
    assert bench.kv.num_evictable() == [num_used - 2] == bench.num_used
    bench.scheduler.check_invariants()
    bench.let_go()
    assert bench.kv.num_evictable() == [0]


def test_could_fit_costs_the_same_for_any_number_of_retained_requests() -> None:
    found: list[int] = []
    for num_held in (2, 40):
        bench = HeldBench(num_blocks=200, caching=False)
        for i in range(num_held):
            bench.keep(f"{i}")
        with counted_calls() as calls:
            assert bench.scheduler.memory.could_fit([200])
        found.append(calls.total())
    assert found[0] == found[1] < 40


@pytest.mark.parametrize(
    ("other", "are_equal"),
    [({}, True), ({"cache_salt": "s"}, False), ({"adapter_id": "a"}, False)],
)
def test_block_names_are_reused_only_for_an_equal_salt_and_adapter(
    other: dict[str, str], are_equal: bool
) -> None:
    one = make_request("one", [1, 2, 3])
    two = msgspec.structs.replace(make_request("two", [1, 2, 3]), **other)
    assert _have_same_names(one, two) is are_equal
