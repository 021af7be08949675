"""The paper's beam search example on a live core, with the same block numbers (P fig. 9)."""

import numpy as np

from quire.base.clock import FakeClock
from quire.base.masks import MaskPromise
from quire.base.plan import Candidates, Plan, StepResult
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.engine.loop.core import EngineCore
from quire.kv.manager import KVManager
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.sequence import Sequence
from quire.scheduler.scheduler import Scheduler
from quire.spec.cache_group import CacheGroup
from tests.support.scheduler.fake_device import VOCAB, FakeDevice, FakeExecutor, make_request

FULL = CacheGroup("full", (0,), 1, 8)
SIZE, WIDTH = 4, 4
PROMPT = [41, 42, 43, 44]  # one full block
NUM_BLOCKS = 17  # the prompt's block, and four blocks per beam if beams share no others

STAY = [(0, 1), (1, 2), (2, 3), (3, 4)]
# The best candidates of each step: (beam, token), best first. The tokens of a step differ, so the
# four beams have four different texts.
CHOICES: list[list[tuple[int, int]]] = [
    [(0, 10), (0, 11), (0, 12), (0, 13)],  # the second block: the figure shows two of 4
    *[STAY] * 7,
    [(0, 20), (0, 21), (0, 22), (1, 23)],  # the fourth block: 0-2 share the third
    *[STAY] * 3,
    [(1, 30), (1, 31), (2, 32), (2, 33)],  # the dotted line: all originate from 1 and 2
    STAY,
]
NUM_BEFORE = 12  # steps before the dotted line
# The order in which the free list returns blocks, so that they get the figure's numbers. The figure
# shows two of the four beams' second and third blocks; the other beams use blocks 13 to 16.
FREE_ORDER = [0, 1, 2, 13, 14, 3, 4, 15, 16, 5, 8, 6, 7, 10, 12, 9, 11]


def texts() -> list[list[tuple[int, ...]]]:
    """Return the outputs of the beams before each step, best beam first."""
    found: list[list[tuple[int, ...]]] = [[()]]
    for choice in CHOICES:
        found.append([(*found[-1][parent], token) for parent, token in choice])
    return found


class Oracle(FakeDevice):
    """A device whose candidates make the beams of `CHOICES`. It checks that each beam reads its own
    tokens through its table, like every fake device."""

    num_copied = 0  # blocks

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        result = super().run(plan)
        self.num_copied += sum(len(move.source) for move in plan.moves)
        candidates = {}
        for row in plan.sample_rows.tolist():
            output = tuple(self.tokens[row][len(PROMPT) : self.computed[row]])
            candidates[row] = self._candidates_after(output)
        return result.replace(candidates=candidates)

    def _apply(self, plan: Plan) -> None:
        super()._apply(plan)
        for host in plan.host_tokens:
            row = self.tokens[host.row][: host.position]
            self.tokens[host.row] = [*row, *host.token_ids.tolist()]

    def _candidates_after(self, output: tuple[int, ...]) -> Candidates:
        """Give beam k of t tokens the score -t - k / 10, and other continuations a low score."""
        beam = texts()[len(output)].index(output)
        children = [
            (token, -1 - (k - beam) / 10)
            for k, (parent, token) in enumerate(CHOICES[len(output)])
            if parent == beam
        ]
        others = [(token, -50.0 - token) for token in range(34, 40)]
        best = [*children, *others]
        token_ids, logprobs = zip(best[0], *best, strict=True)  # the chosen one comes first
        return Candidates(np.array(token_ids, np.int32), np.array(logprobs, np.float32), 1)


class Figure:
    """A core over the oracle, with one beam search."""

    def __init__(self) -> None:
        self.kv = KVManager((FULL,), (NUM_BLOCKS,), SIZE, free_orders=[FREE_ORDER])
        self.device = Oracle((FULL,), (NUM_BLOCKS,), SIZE)
        config = SchedulerConfig(max_num_seqs=WIDTH, max_num_batched_tokens=16)
        self.core = EngineCore(
            Scheduler(Memory(self.kv, 16), config, max_model_len=32),
            FakeExecutor(self.device, is_lazy=False),
            FakeClock(),
            RequestLimits(VOCAB, 32, 20, WIDTH),
        )
        request = make_request(
            "fig9", PROMPT, n=WIDTH, use_beam_search=True, max_tokens=len(CHOICES)
        )
        self.core.add(request)

    @property
    def beams(self) -> list[Sequence]:
        """Return candidates 0 to 3, best first."""
        group = self.core.scheduler.rows.sequences()[0].group
        assert group is not None
        return group.order

    def tables(self) -> list[list[int]]:
        return [list(beam.blocks.tables[0].blocks) for beam in self.beams]

    def outputs(self) -> list[tuple[int, ...]]:
        return [tuple(beam.known_tokens[len(PROMPT) :].tolist()) for beam in self.beams]

    def num_refs(self) -> dict[int, int]:
        """Return the reference counts of the blocks in use."""
        counts = {block: self.kv.pools[0].num_refs(block) for block in range(NUM_BLOCKS)}
        return {block: count for block, count in counts.items() if count}

    def plan(self) -> None:
        assert self.core.plan() is not None

    def take(self) -> None:
        self.core.take()
        self.core.scheduler.check_invariants()

    def finish(self) -> list[tuple[int, ...]]:
        """Run to the end and return the resulting beams."""
        while not (updates := self.core.step().details):
            self.core.scheduler.check_invariants()
        [update] = updates
        assert not self.core.has_work and update.beams is not None
        return [tuple(beam.token_ids) for beam in update.beams]


def test_beams_have_the_block_tables_of_figure_9() -> None:
    figure = Figure()
    figure.plan()
    for _ in range(NUM_BEFORE):
        figure.take()
        figure.plan()
    # All share block 0, the prompt; 3 diverges at the second block, 0-2 at the fourth.
    assert figure.outputs() == texts()[NUM_BEFORE]
    assert figure.tables() == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    assert figure.num_refs() == {0: 4, 1: 3, 2: 1, 3: 3, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1}

    figure.take()  # the dotted line: the top 4 originate from candidates 1 and 2
    assert figure.outputs() == texts()[NUM_BEFORE + 1]
    assert figure.tables() == [[0, 1, 3, 6], [0, 1, 3, 6], [0, 1, 3, 7], [0, 1, 3, 7]]
    assert figure.num_refs() == {0: 4, 1: 4, 3: 4, 6: 2, 7: 2}, "blocks 2, 4, 5 and 8 are not free"

    figure.plan()  # new blocks for the new candidates; nothing is copied
    assert figure.tables() == [
        [0, 1, 3, 6, 9],
        [0, 1, 3, 6, 10],
        [0, 1, 3, 7, 11],
        [0, 1, 3, 7, 12],
    ]
    assert figure.num_refs() == {0: 4, 1: 4, 3: 4, 6: 2, 7: 2, 9: 1, 10: 1, 11: 1, 12: 1}

    assert figure.finish() == texts()[-1]
    assert figure.num_refs() == {}
    assert figure.device.num_copied == 0, "a full block was copied instead of shared"
