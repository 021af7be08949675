"""Steps with guesses: one forward pass, then what plain steps do, one for each place (T 4.4.4).

The forward pass computes the guesses behind each row's last known token, as if they were known.
Then the rows sample as they would without them: first all, then those whose guess was right, at the
next place, and so on. Each of these is a plain step, whose hidden states are there already; so what
a row samples is what it would have sampled, whatever it asks for, and what a wrong guess has left
in the cache is written again.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.base.masks import MaskPromise
from quire.base.plan import Candidates, Plan, StepResult
from quire.ops.host_memory import to_device
from quire.ops.select_rows import select_rows
from quire.runner.launched import Launched


class Computed(NamedTuple):
    """What a forward pass has given to a plain step: hidden states of its tokens, [T, D] (none
    behind a guess, where no prompt is scored), and logits of those rows that sample, [N, V]."""

    hidden_TD: torch.Tensor
    logits_NV: torch.Tensor


Compute = Callable[[], Computed]


class PlainSteps(Protocol):
    """What a step with guesses is made of."""

    def forward(self, plan: Plan) -> torch.Tensor:
        """Write a plan's guesses behind its rows' tokens and compute the hidden states of all that
        it schedules, [T, D]."""
        ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Compute logits, [R, V]."""
        ...

    def launch_from(
        self, plan: Plan, compute: Compute | None, masks: MaskPromise | None = None
    ) -> Launched:
        """Launch a plan without guesses; `compute` does what its forward pass would do."""
        ...


class GuessedStep:
    """The forward pass of a plan with guesses, for the plain steps that follow from it."""

    def __init__(self, steps: PlainSteps, plan: Plan) -> None:
        self._steps, self._plan = steps, plan
        self._logits = torch.empty(0)  # of all rows that sample, then of all guesses
        self._num_drafts = plan.num_drafts
        self._last = np.cumsum(plan.num_tokens) - self._num_drafts - 1  # each row's known ones
        self._place = {row: i for i, row in enumerate(plan.rows.tolist())}
        counts = [len(draft.token_ids) for draft in plan.drafts]
        firsts = len(plan.sample_rows) + np.cumsum([0, *counts[:-1]])
        pairs = zip(plan.drafts, firsts.tolist(), strict=True)
        self._logits_of = {draft.row: first for draft, first in pairs}

    @property
    def without_guesses(self) -> Plan:
        """Return what is to be done first: the plan as it would be if nothing had been guessed."""
        num_tokens = self._plan.num_tokens - self._num_drafts
        return dataclasses.replace(self._plan, num_tokens=num_tokens, drafts=())

    def compute(self) -> Computed:
        """Compute all; returns what is the plan's without guesses."""
        plan, is_guess = self._plan, np.zeros(self._plan.num_scheduled_tokens, bool)
        hidden_TD = self._steps.forward(plan)
        guesses = [
            self._last[self._place[draft.row]] + 1 + np.arange(len(draft.token_ids))
            for draft in plan.drafts
        ]
        places = np.concatenate([self._last[plan.sample_places], *guesses])
        self._logits = self._steps.logits(_rows(hidden_TD, places))
        is_guess[np.concatenate(guesses)] = True
        known_TD = _rows(hidden_TD, np.flatnonzero(~is_guess))
        return Computed(known_TD, self._logits[: len(plan.sample_rows)])

    def computed_at(self, rows: list[int], depth: int) -> Computed:
        """Return what comes of each of these rows' guess of this number, from 1."""
        places = np.array([self._logits_of[row] + depth - 1 for row in rows])
        return Computed(self._logits[:0], _rows(self._logits, places))

    def plan_at(self, rows: list[int], depth: int) -> Plan:
        """Make the plain step in which these rows' guess of this number is their last token."""
        plan, places = self._plan, np.array([self._place[row] for row in rows])
        asked = dict(zip(plan.sample_rows.tolist(), plan.num_candidates.tolist(), strict=True))
        bound = plan.computed_bound[places] + plan.num_tokens[places] - self._num_drafts[places]
        row_array = np.array(rows, np.int32)
        return Plan(
            plan.step_id,
            rows=row_array,
            num_tokens=np.ones(len(rows), np.int32),
            computed_bound=(bound + depth - 1).astype(np.int32),
            sample_rows=row_array,
            num_candidates=np.array([asked[row] for row in rows], np.int32),
        )


def _rows(values: torch.Tensor, places: npt.NDArray[np.integer]) -> torch.Tensor:
    return select_rows(values, to_device(places.astype(np.int64), values.device))


def run_with_guesses(steps: PlainSteps, plan: Plan, masks: MaskPromise | None) -> StepResult:
    """Carry out a plan with guesses, and wait for it. What goes wrong behind the first token of a
    row ends its guesses there: the row's next step will meet with it."""
    step = GuessedStep(steps, plan)
    first = steps.launch_from(step.without_guesses, step.compute, masks).result()
    guesses = {draft.row: draft.token_ids.tolist() for draft in plan.drafts}
    rows = plan.sample_rows.tolist()
    tokens = dict(zip(rows, first.token_ids.tolist(), strict=True))
    more: dict[int, list[Candidates]] = {}
    alive = [row for row in guesses if row not in first.row_errors]
    duration_s = first.duration_s
    for depth in range(1, max(map(len, guesses.values())) + 1):
        alive = [r for r in alive if guesses[r][depth - 1 : depth] == tokens[r][-1:]]
        if not alive:
            break
        try:
            compute = partial(step.computed_at, alive, depth)
            found = steps.launch_from(step.plan_at(alive, depth), compute).result()
        except torch.OutOfMemoryError:
            break
        duration_s += found.duration_s
        for row, token in zip(alive, found.token_ids[:, 0].tolist(), strict=True):
            if row not in found.row_errors:
                tokens[row].append(token)
        for row, candidates in found.candidates.items():
            more.setdefault(row, []).append(candidates)
        alive = [row for row in alive if row not in found.row_errors]
    counts = np.array([len(tokens[row]) for row in rows], np.int32)
    token_ids = np.zeros((len(rows), int(counts.max(initial=1))), np.int32)
    for place, row in enumerate(rows):
        token_ids[place, : counts[place]] = tokens[row]
    return dataclasses.replace(
        first, token_ids=token_ids, num_accepted=counts, more_candidates=more, duration_s=duration_s
    )
