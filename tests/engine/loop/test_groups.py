"""Each sequence of a request for several gets the tokens that it gets alone, whatever the schedule.

Covers `scheduler/branching/branching.py`.
"""

from typing import Any

import pytest

from quire.base.errors import RequestError
from quire.base.messages import Abort, Request
from quire.base.plan import Plan
from quire.base.requests.sampling_params import SamplingParams
from tests.support.cases import in_turn
from tests.support.engine.failing_core import Bench
from tests.support.engine.updates import read
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes

PROMPT = [7, 3, 9, 1, 12, 44, 5, 80, 23, 61]  # two full blocks of four, and half of one
OTHERS = {"a": [5, 6, 7], "b": [90, 2, 2, 8, 41], "c": PROMPT[:8] + [50]}
LENGTH = 14


class Groups(Bench):
    """A bench that collects the tokens and finish reason of each sequence."""

    def __init__(self, architecture: str = "llama", **settings: Any) -> None:
        super().__init__(checkpoint(architecture), **settings)
        self.runner.raises = self._note_moves
        self.num_moves = {"swap_out": 0, "load": 0, "copy": 0}
        self.samples: dict[tuple[str, int], list[int]] = {}
        self.endings: dict[tuple[str, int], str] = {}

    def submit(self, name: str, prompt: list[int], n: int, **more: Any) -> None:
        params = SamplingParams(
            **({"n": n, "temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True} | more)
        )
        self.core.add(Request(name, prompt, params, seed=11))

    def step(self) -> list[Any]:
        outputs = read(self.reader, self.core.step())
        for output in outputs:
            key = output.request_id, output.index
            assert key not in self.endings, "update after the end"
            self.samples.setdefault(key, []).extend(output.token_ids)
            if output.finish is not None:
                self.endings[key] = output.finish.reason
        self.core.scheduler.check_invariants()
        return outputs

    def _note_moves(self, plan: Plan) -> bool:
        for move in plan.moves:
            self.num_moves[move.kind] += 1
        return False

    @property
    def num_preemptions(self) -> int:
        return sum(s.num_preemptions for s in self.core.scheduler.rows.sequences())


def alone(prompt: list[int], index: int, **more: Any) -> list[int]:
    """Return the tokens of this sequence index in an engine with no other requests."""
    groups = Groups(max_num_seqs=8, enable_prefix_caching=False)
    groups.submit("r", prompt, index + 1, **more)
    groups.finish()
    return groups.samples["r", index]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    found = [alone(PROMPT, index) for index in range(4)]
    assert len({tuple(tokens) for tokens in found}) == 4, "the samples do not differ"
    return found


def test_first_sequence_equals_that_of_a_request_with_n_1(expected: list[list[int]]) -> None:
    groups = Groups(max_num_seqs=8)
    groups.submit("one", PROMPT, 1)
    groups.finish()
    assert groups.samples["one", 0] == expected[0]


@pytest.mark.parametrize(
    ("caching", "depth", "budget"),
    in_turn([True, False], [1, 2, 3], [3, 16, 64]),
)
def test_sequences_do_not_depend_on_the_batch(
    caching: bool, depth: int, budget: int, expected: list[list[int]]
) -> None:
    """Prompts are chunked, plans are in flight, and other requests share the batch."""
    groups = Groups(
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
    )
    groups.submit("a", OTHERS["a"], 1)
    groups.submit("r", PROMPT, 4)
    groups.submit("c", OTHERS["c"], 3)
    groups.finish()
    for index in range(4):
        assert groups.samples["r", index] == expected[index]
        assert groups.endings["r", index] == "length"
    for index in range(3):
        assert groups.samples["c", index] == alone(OTHERS["c"], index)


@pytest.mark.parametrize(
    ("mode", "caching", "depth"),
    in_turn(["recompute", "swap"], [True, False], [3, 1, 2]),
)
def test_group_is_preempted_and_resumed_as_one(
    mode: str, caching: bool, depth: int, expected: list[list[int]]
) -> None:
    """The pool has blocks for the longest group, but not for both requests."""
    groups = Groups(
        max_num_seqs=8,
        max_num_batched_tokens=16,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
        preemption_mode=mode,
        kv_cache_memory_bytes=pool_bytes(checkpoint("llama"), 21, 4),
        watermark=0.0,
    )
    groups.submit("a", OTHERS["a"], 1, max_tokens=40)
    groups.submit("r", PROMPT, 4)
    preempted = False
    while groups.core.has_work:
        groups.step()
        running = [s for s in groups.core.scheduler.rows.sequences() if s.request.request_id == "r"]
        preempted |= any(s.num_preemptions for s in running)
    assert preempted, "the group was not preempted"
    assert (groups.num_moves["load"] > 0) == (mode == "swap")
    for index in range(4):
        assert groups.samples["r", index] == expected[index]
    assert len(groups.samples["a", 0]) == 40


def test_sequences_share_prompt_blocks_and_copy_the_last_one_on_write() -> None:
    """P fig. 8: each sequence references the prompt's blocks. The first to write into the shared
    last block gets a copy; the last one writes in place."""
    groups = Groups(max_num_seqs=4, enable_prefix_caching=False)
    groups.submit("r", PROMPT[:7], 2)  # one full block, and three of four slots of another
    pool = groups.core.scheduler.memory.kv.pools[0]
    groups.step()
    first, second = groups.core.scheduler.rows.sequences()
    assert first.blocks.tables[0].blocks == second.blocks.tables[0].blocks
    shared = first.blocks.tables[0].blocks.copy()
    assert [pool.num_refs(block) for block in shared] == [2, 2]
    assert pool.num_used == 2
    groups.step()
    mine, other = first.blocks.tables[0].blocks, second.blocks.tables[0].blocks
    assert mine[0] == other[0] == shared[0] and pool.num_refs(shared[0]) == 2
    assert mine[1] != shared[1] and other[1] == shared[1]
    assert pool.num_refs(mine[1]) == pool.num_refs(other[1]) == 1
    assert pool.num_used == 3


def test_rows_are_reserved_for_all_sequences_at_admission() -> None:
    groups = Groups(max_num_seqs=4, max_num_batched_tokens=4)
    groups.submit("r", PROMPT, 3)
    groups.submit("b", OTHERS["b"], 2)
    groups.step()
    assert groups.core.scheduler.num_free_rows == 1  # too few for the second request
    while ("r", 0) not in groups.endings:
        groups.step()
        assert ("b", 0) not in groups.samples
    groups.finish()
    assert len(groups.samples["b", 1]) == LENGTH


@pytest.mark.parametrize("index", [-1, 0, 1])
def test_abort_ends_one_sequence_or_all(index: int, expected: list[list[int]]) -> None:
    groups = Groups(max_num_seqs=4)
    groups.submit("r", PROMPT, 3)
    for _ in range(4):
        groups.step()
    groups.core.control(Abort("r", index=index))
    groups.finish()
    for i in range(3):
        full = len(groups.samples["r", i]) == LENGTH
        assert full == (index not in (-1, i))
        assert groups.samples["r", i] == expected[i][: len(groups.samples["r", i])]


def test_abort_before_the_fork_frees_the_reserved_rows() -> None:
    groups = Groups(max_num_seqs=4, max_num_batched_tokens=4)
    groups.submit("r", PROMPT, 4)
    groups.step()
    assert groups.core.scheduler.num_free_rows == 0
    groups.core.control(Abort("r"))
    assert groups.core.scheduler.num_free_rows == 4
    groups.core.scheduler.check_invariants()
    groups.finish()


def test_penalties_apply_to_each_sequence_separately() -> None:
    more: dict[str, Any] = {"presence_penalty": 1.5, "repetition_penalty": 1.3, "max_tokens": 20}
    groups = Groups(max_num_seqs=8)
    groups.submit("r", PROMPT, 3, **more)
    groups.finish()
    for index in range(3):
        assert groups.samples["r", index] == alone(PROMPT, index, **more)


@pytest.mark.parametrize("depth", [1, 2])
def test_guilty_request_fails_with_all_its_sequences(depth: int, expected: list[list[int]]) -> None:
    groups = Groups(max_num_seqs=8, pipeline_depth=depth)
    groups.runner.raises = groups.runner.holds_poison
    groups.submit("bad", [1, 2, 96, 4, 5], 3)
    groups.submit("r", PROMPT, 4)
    groups.finish()
    assert groups.endings["bad", 0] == "error"
    assert not any(groups.samples.get(("bad", index)) for index in range(3))
    assert [groups.samples["r", index] for index in range(4)] == expected


def test_requests_that_can_never_fit_are_rejected() -> None:
    groups = Groups(max_num_seqs=4, kv_cache_memory_bytes=pool_bytes(checkpoint("llama"), 18, 4))
    with pytest.raises(RequestError, match="max_num_seqs"):
        groups.submit("r", PROMPT, 5)
    with pytest.raises(RequestError, match="KV blocks|blocks than the pool"):
        groups.submit("r", PROMPT, 4, max_tokens=50)
    groups.submit("r", PROMPT, 3, max_tokens=8)
    groups.finish()
