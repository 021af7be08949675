"""The scheduler's reports to watchers: each block, running sequences, and waiting sequences with
the reason.

Covers `base/live.py`.
"""

import msgspec
import pytest

from quire.base.live import CACHED, HELD, NO_OWNER, PINNED, REASONS, USED
from quire.base.messages import Append
from quire.kv.manager import SequenceBlocks
from quire.spec.cache_group import STATE, CacheGroup
from tests.support.cases import in_turn
from tests.support.scheduler.pinning_core import FULL, WINDOW, Bench
from tests.support.scheduler.watched_scheduler import blocks_of, random_run, told_blocks

STATES = CacheGroup(STATE, (2,), state_size=8)


def max_blocks(blocks: SequenceBlocks | None) -> int:
    """Return the number of blocks of the largest group."""
    return 0 if blocks is None else max(len(table.live_blocks) for table in blocks.tables)


@pytest.mark.parametrize(
    ("groups", "mode"), in_turn([(FULL, WINDOW), (FULL, STATES)], ["recompute", "swap"])
)
def test_the_live_state_reports_each_block_and_each_row(
    groups: tuple[CacheGroup, ...], mode: str
) -> None:
    seen: set[int] = set()
    max_sharers = without_blocks = 0
    for bench in random_run(5, 160, groups, preemption_mode=mode, pipeline_depth=1):
        state = bench.scheduler.live_state()
        for g in range(len(groups)):
            blocks = blocks_of(bench, g)
            assert told_blocks(state, g) == blocks
            seen |= {of_block[2] for of_block in blocks}
            max_sharers = max(max_sharers, *(of_block[1] for of_block in blocks))
        running = {(row.id, row.index): row for row in state.running}
        assert len(running) == bench.scheduler.num_running
        for sequence in bench.scheduler.rows.sequences():
            row = running[sequence.request.request_id, sequence.index]
            reported = row.num_prompt_tokens, row.num_computed_tokens, row.num_known_tokens
            assert reported == (
                sequence.num_prompt_tokens,
                sequence.num_computed_tokens,
                len(sequence.known_tokens),
            )
        held = bench.scheduler.retained.all()
        assert state.num_held == len(held) == len(state.held)
        assert {row.id for row in state.held} == {each.request.request_id for each in held}
        assert [row.num_blocks for row in state.held] == [max_blocks(each.blocks) for each in held]
        without_blocks += sum(each.blocks is None for each in held)
        waiting = len(state.waiting)
        assert waiting == state.num_waiting >= bench.scheduler.num_waiting
        assert {row.reason for row in state.waiting} <= REASONS.keys()
    assert seen >= {CACHED, USED, PINNED, HELD} and max_sharers > 2
    assert without_blocks > 0
    assert bench.num_preempted > 0


def test_watching_changes_no_plan_and_no_output() -> None:
    def outputs(is_watched: bool) -> dict[str, dict[int, list[int]]]:
        for bench in random_run(8, 80, preemption_mode="swap"):
            if is_watched:
                bench.scheduler.live_state()
        plans = [(p.step_id, p.rows.tolist(), p.num_tokens.tolist()) for p in bench.plans]
        return {"plans": {0: plans}} | bench.output  # type: ignore[dict-item]

    assert outputs(True) == outputs(False)


def reasons(bench: Bench) -> dict[str, str]:
    return {row.id: row.reason for row in bench.scheduler.live_state().waiting}


def test_the_live_state_reports_why_a_request_waits() -> None:
    bench = Bench(num_blocks=24, max_num_seqs=2)
    bench.add("first", list(range(8)), 40)
    bench.add("second", list(range(20, 28)), 40)
    bench.add("third", [1], 5)
    assert reasons(bench) == {"first": "turn", "second": "behind", "third": "behind"}
    bench.step()
    assert reasons(bench) == {"third": "rows"}
    bench = Bench(num_blocks=24, max_num_seqs=4)
    bench.add("large", list(range(50)), 40)
    bench.step()
    bench.add("next", list(range(2, 50)), 2)
    bench.add("last", [1], 2)
    bench.step()
    bench.step()
    assert reasons(bench) == {"next": "blocks", "last": "behind"}


def test_an_open_prompt_waits_for_its_next_piece() -> None:
    bench = Bench()
    request = bench.add("open", [1, 2, 3], 4)
    bench.core.control(Append("open", [], is_last=True))
    bench.finish()
    opened = msgspec.structs.replace(request, request_id="parts", is_open=True)
    bench.core.add(msgspec.structs.replace(opened, prompt_token_ids=[1]))
    bench.step()
    assert reasons(bench) == {"parts": "prompt"}


def test_a_block_without_references_has_no_owner() -> None:
    bench = Bench()
    bench.add("one", list(range(9)), 2)
    bench.finish()
    [group] = bench.scheduler.live_state().groups
    assert set(group.owners.tolist()) == {NO_OWNER}
    assert group.states.tolist().count(CACHED) == 2
