"""Parts of a plan beside its rows: forks and moves of blocks, each once for a step, and which
log-probabilities of prompts a step can tell."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from quire.base.plan import Plan, RowFork
from quire.base.sampling_params import SamplingParams
from quire.runner.named_tokens import padded
from quire.runner.sampling_flags import ALL_LOGPROBS

Int32 = npt.NDArray[np.int32]

SCORED_AT_ONCE = 64  # positions whose logits exist at the same time: those of a chunk would not fit


class Forks:
    """Which forks of a step were carried out. A step that is repeated does not fork once more: the
    plan may have changed the parent's table since."""

    def __init__(self) -> None:
        self._step_id = -1
        self._done: set[RowFork] = set()

    def to_do(self, plan: Plan) -> list[RowFork]:
        """Return those that no try of this step has carried out."""
        if plan.step_id != self._step_id:
            self._step_id, self._done = plan.step_id, set()
        return [fork for fork in plan.forked if fork not in self._done]

    def did(self, *forks: RowFork) -> None:
        self._done.update(forks)


class MovesBlocks(Protocol):
    """What moves whole blocks of a cache group; see `AttentionBackend`."""

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None: ...
    def swap_out(self, group: int, source: Int32, destination: Int32) -> None: ...
    def load(self, group: int, source: Int32, destination: Int32) -> None: ...


class Moves:
    """A plan's moves, in their order. A step that is repeated does not swap out once more: the
    blocks may have been written since, by a load or by the step itself."""

    def __init__(self, backend: MovesBlocks) -> None:
        self._backend = backend
        self._step_id = -1
        self._num_swaps = 0  # that were carried out; a part of a plan has all of them, or none

    def carry_out(self, plan: Plan) -> None:
        backend, place = self._backend, 0
        if plan.step_id != self._step_id:
            self._step_id, self._num_swaps = plan.step_id, 0
        for move in plan.moves:
            blocks = (move.group, move.source, move.destination)
            if move.kind == "load":
                backend.load(*blocks)
            elif move.kind == "copy":
                backend.copy_blocks(*blocks)
            else:
                place += 1
                if place > self._num_swaps:
                    backend.swap_out(*blocks)
                    self._num_swaps = place


@dataclass(frozen=True, eq=False)
class NamedRows:
    """Tokens whose log-probabilities were asked for by name: counts [P] of each position, and ids
    [P, C], padded with 0."""

    counts: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]

    @classmethod
    def of(cls, params: SamplingParams) -> "NamedRows | None":
        """Make those of a whole prompt."""
        rows = params.named_in_prompt
        return cls(*padded(rows)) if rows else None

    def part(self, first: int, last: int) -> "NamedRows":
        return NamedRows(self.counts[first:last], self.ids[first:last])


@dataclass(frozen=True)
class Scored:
    """Positions first..last-1 of a row, at `place` among the step's tokens, whose next tokens are
    known and whose log-probabilities were asked for; num: candidates for each. named: which these
    are; None: the most probable ones."""

    row: int
    first: int
    last: int
    place: int
    num: int
    named: NamedRows | None = None

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Return how many candidates each position has."""
        return np.full(self.count, self.num) if self.named is None else self.named.counts

    @property
    def count(self) -> int:
        return self.last - self.first


class PromptScores:
    """Which rows asked for log-probabilities of their prompt."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._asked: dict[int, int] = {}  # row -> candidates per position
        self._named: dict[int, NamedRows] = {}  # row -> which these are, if they were named

    def start_and_release(self, plan: Plan) -> None:
        """Note which rows a plan releases and starts."""
        for row in plan.released.tolist():
            self._asked.pop(row, None)
            self._named.pop(row, None)
        for start in plan.started:
            self._asked.pop(start.row, None)
            self._named.pop(start.row, None)
            if (named := NamedRows.of(start.params)) is not None:
                self._named[start.row] = named
            num = start.params.prompt_logprobs
            if num is not None:
                self._asked[start.row] = self._vocab_size if num == ALL_LOGPROBS else num

    def may_have(self, plan: Plan, prompt_lens: npt.NDArray[np.int64]) -> bool:
        """Return whether the plan's step tells any. prompt_lens: of all rows, before the plan; it
        may make them longer."""
        if not self._asked:
            return False
        asked = [i for i, row in enumerate(plan.rows.tolist()) if row in self._asked]
        if not asked or plan.started or plan.host_tokens:
            return len(asked) > 0
        lens = prompt_lens[plan.rows[asked]]
        return bool((plan.computed_bound[asked] < lens - 1).any())

    def of(self, plan: Plan, prompt_lens: npt.NDArray[np.int64]) -> list[Scored]:
        """List what the plan's step tells, in the order of rows and positions. prompt_lens: of all
        rows, with this plan."""
        found: list[Scored] = []
        if not self._asked:
            return found
        ends = np.cumsum(plan.num_tokens)
        for i, row in enumerate(plan.rows.tolist()):
            if row not in self._asked:
                continue
            first, num_tokens = int(plan.computed_bound[i]), int(plan.num_tokens[i])
            last, place = (
                min(first + num_tokens, int(prompt_lens[row]) - 1),
                int(ends[i]) - num_tokens,
            )
            for at in range(first, last, SCORED_AT_ONCE):
                end = min(last, at + SCORED_AT_ONCE)
                named = self._named.get(row)
                part = None if named is None else named.part(at, end)
                found.append(Scored(row, at, end, place + at - first, self._asked[row], part))
        return found
