"""Steps with guesses: one forward pass, and one choice at each place (T 4.4.4).

The forward pass computes the guesses behind each row's last known token, as if they were known. A
row's places are this token and its guesses, and the row chooses at all of them at once, each time
by what it would have known there. What it has chosen counts up to the first that is not the guess:
those are the tokens that it would have chosen without guesses, whatever it asks for. What wrong
guesses have left in the cache is written again.

Guesses of the host follow known tokens, and the host judges them and moves the counters: such a
step has ended when `begin` returns (`GuessedStep`). Where the device makes them it judges them,
too, by what its rows hold, and the next step may be launched behind this one (`GuessingStep`).

Shape legend: T tokens of the step, S scheduled rows, N sampling rows, K most guesses of a row, P
places: the sampling rows' own, then those of all guesses.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.base.masks import MaskPromise
from quire.base.plan import Candidates, Plan, StepResult
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.kept_inputs import KeptInputs
from quire.ops.device_guesses import NO_GUESS, NO_TOKEN, Runs, Tries, accept_guesses
from quire.ops.host_memory import to_device
from quire.ops.row_state import advance, write_tokens
from quire.ops.select_rows import select_rows
from quire.ops.step_inputs import SampleInputs, gather_step
from quire.runner.candidates import CandidatesPart
from quire.runner.step_ops import Sampling
from quire.runner.steps import (
    StepRunner,
    give,
    read_forward,
    reasons_of,
    shape_of,
    unservable,
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Places(NamedTuple):
    """Where rows choose, arrays [P]. sampling: which of the sampling rows; depths: 0, or which of
    its guesses, from 1; last: which of the step's tokens; lengths: tokens known there."""

    rows: Int32
    sampling: Int64
    depths: Int64
    last: Int64
    lengths: Int64


def places_of(plan: Plan) -> Places:
    """List the places of a plan with guesses."""
    rows_N, num_samples = plan.sample_rows, len(plan.sample_rows)
    counts = np.array([len(draft.token_ids) for draft in plan.drafts])
    order = np.argsort(rows_N, kind="stable")
    drafted = np.array([draft.row for draft in plan.drafts], np.int32)
    guessing = order[np.searchsorted(rows_N, drafted, sorter=order)].repeat(counts)
    depths = np.arange(1, 1 + len(guessing)) - (np.cumsum(counts) - counts).repeat(counts)
    sampling = np.concatenate([np.arange(num_samples), guessing])
    depths = np.concatenate([np.zeros(num_samples, np.int64), depths])
    scheduled, num_guessed = plan.sample_places[sampling], plan.num_drafts
    return Places(
        rows_N[sampling],
        sampling,
        depths,
        (np.cumsum(plan.num_tokens) - num_guessed - 1)[scheduled] + depths,
        (plan.computed_bound + plan.num_tokens - num_guessed)[scheduled] + depths,
    )


class DraftSteps:
    """Makes the steps of plans with guesses. runs: how the device makes guesses that plans leave to
    it; None: no plan does."""

    def __init__(self, runs: Runs | None = None) -> None:
        self.runs = runs

    def __call__(self, runner: StepRunner, plan: Plan, masks: MaskPromise | None) -> "GuessedStep":
        if not plan.is_guessing:
            return GuessedStep(runner, plan, masks)
        assert self.runs is not None, "the device's drafter is not set"
        return GuessingStep(runner, plan, masks, self.runs)


class GuessedStep:
    """A plan with guesses of the host on its way through a runner; nothing is behind it before it
    has ended."""

    def __init__(self, runner: StepRunner, plan: Plan, masks: MaskPromise | None) -> None:
        self._runner, self._plan, self._masks = runner, plan, masks
        self._places = places_of(plan)
        self._kept: KeptInputs | None = None  # until the rows' states are settled
        self._logits: torch.Tensor | None = None  # of the first half, for the other
        self._scored: list[torch.Tensor] = []

    def begin(self) -> None:
        """Carry it out; the rows' counters move last of all."""
        self._give()
        arrived = self._arrivals[-1].wait()
        tokens_NK1, counts_N = accept(self._plan, self._places, arrived[0].numpy())
        seconds = self._settle(tokens_NK1, counts_N)
        self._found = self._result(arrived[1:], tokens_NK1, counts_N, seconds)

    def is_done(self) -> bool:
        """See Step."""
        return True

    def end(self) -> StepResult:
        """See Step."""
        return self._found

    def _give(self) -> None:
        """Give it to the device."""
        plan, rows, sampler = self._plan, self._runner.rows, self._runner.sampler
        self._forward = self._runner.follow(plan)
        asked = sampler.asked(self._places.rows, plan.masked_rows)
        self._needs = sampler.needs(asked)
        self._parts = sampler.parts(self._needs, asked)
        updates = rows.changes(plan, sampler.flags.has_edits)
        prompt_lens = rows.prompt_lens[self._places.rows]
        self._sampling = Sampling(asked, self._places.lengths, prompt_lens)
        change, halves = rows.ops.prepare(updates, None), (self._first, self._second)
        depths = self._places.depths
        self._arrivals, self._errors = give(
            rows, change, halves, self._sampling, self._masks, depths
        )

    def _first(self) -> list[torch.Tensor]:
        """Compute logits and what the parts want; returns what the host looks at before the other
        half."""
        runner, plan, places = self._runner, self._plan, self._places
        runner.moves.carry_out(plan)
        for part in self._forward:
            part.before()
        hidden_TD = self._hidden()
        if any(part.num_tensors for part in self._forward):
            is_known = np.ones(plan.num_scheduled_tokens, bool)
            is_known[places.last[places.depths > 0]] = False
            known_TD = select_rows(hidden_TD, self._index(np.flatnonzero(is_known)))
            self._scored = [each for part in self._forward for each in part.after(known_TD)]
        self._logits = runner.logits(hidden_TD, self._index(places.last), self._needs)
        extras = self._sampling.asked.extras
        if extras is None or not extras.hosted:
            return []
        return extras.seen(self._logits, int(places.lengths.max()))

    def _hidden(self) -> torch.Tensor:
        """Write the guesses behind the rows' tokens, and compute the hidden states of all that the
        plan schedules, [T, D]."""
        plan, rows = self._plan, self._runner.rows
        lens = (plan.computed_bound + plan.num_tokens).tolist()
        end_of = dict(zip(plan.rows.tolist(), lens, strict=True))
        for draft in plan.drafts:
            begin = end_of[draft.row] - len(draft.token_ids)
            write_tokens(rows.state, draft.row, begin, draft.token_ids)
        self._kept = KeptInputs(self._runner.backend, plan.num_drafts > 0)
        return self._forward_pass(self._kept)

    def _forward_pass(self, backend: AttentionBackend) -> torch.Tensor:
        plan, state, shape = self._plan, self._runner.rows.state, shape_of(self._plan)
        num_blocks = -(-int(shape.context_lens.max()) // state.block_size)
        inputs = gather_step(state, plan.rows, plan.num_tokens, num_blocks)
        return self._runner.hidden(inputs, shape, backend, self._forward)

    def _second(self) -> list[torch.Tensor]:
        """Choose at all places: returns the tokens, log-probabilities, scores."""
        return self._choose(self._index(self._places.lengths))

    def _choose(self, lengths_P: torch.Tensor) -> list[torch.Tensor]:
        rows, places, logits_PV = self._runner.rows, self._places, self._logits
        assert logits_PV is not None, "the first half comes first"
        samples = SampleInputs(
            self._index(places.rows),
            self._index(places.last),
            lengths_P,
            self._index(self._sampling.prompt_lens),
        )
        rows.ops.serve(self._sampling)
        sampler = self._runner.sampler
        ids_P, is_valid_P = sampler.sample(logits_PV, samples, self._needs, self._parts)
        found = [tensor for part in self._parts for tensor in part.found()]
        return [torch.where(is_valid_P, ids_P, NO_TOKEN), *found, *self._scored]

    def _settle(self, tokens_NK1: Int32, counts_N: Int32) -> float:
        """Store the last token of each row, behind the guesses that were right, leave states there,
        and move the counters; returns the seconds that the states took."""
        plan, places, rows = self._plan, self._places, self._runner.rows
        last_N = tokens_NK1[np.arange(len(counts_N)), counts_N - 1]
        lengths_N = places.lengths[: len(counts_N)] + counts_N - 1
        contexts_S = (plan.computed_bound + plan.num_tokens - plan.num_drafts).astype(np.int64)
        is_own = np.isin(plan.sample_rows, plan.rows)
        contexts_S[plan.sample_places[is_own]] += counts_N[is_own] - 1
        seconds = self._settle_states(contexts_S)
        arrays = plan.rows, contexts_S, plan.sample_rows, lengths_N, np.maximum(last_N, 0)

        def work() -> list[torch.Tensor]:
            advance(rows.state, *(self._index(each) for each in arrays))
            return []

        self._runner.device.run(work)
        return seconds

    def _settle_states(self, contexts_S: Int64) -> float:
        """Leave the states of rows that guess behind so many tokens; returns the seconds that it
        took."""
        plan, kept, self._kept = self._plan, self._kept, None
        if kept is None or not kept.has_any:
            return 0.0
        num_tokens = (contexts_S - plan.computed_bound)[plan.num_drafts > 0].astype(np.int32)

        def work() -> list[torch.Tensor]:
            kept.settle(num_tokens)
            return []

        arrival = self._runner.device.run(work)
        arrival.wait()
        return arrival.duration_s()

    def _result(
        self, arrived: list[torch.Tensor], tokens_NK1: Int32, counts_N: Int32, seconds: float = 0.0
    ) -> StepResult:
        at = len(arrived) - sum(part.num_tensors for part in self._forward)
        rows, asked = self._plan.sample_rows, self._sampling.asked
        reasons = reasons_of(rows, tokens_NK1[:, 0], asked, self._errors)
        result = StepResult(
            self._plan.step_id,
            token_ids=np.maximum(tokens_NK1, 0),
            num_accepted=counts_N,
            row_errors=reasons,
            unservable_rows=unservable(reasons),
            duration_s=seconds + sum(arrival.duration_s() for arrival in self._arrivals),
        )
        for part in self._parts:
            if isinstance(part, CandidatesPart):
                result = self._with_candidates(result, part.by_place(arrived[:at]))
        return read_forward(self._forward, result, arrived[at:])

    def _with_candidates(self, result: StepResult, found: dict[int, Candidates]) -> StepResult:
        """Add the candidates of the places whose tokens count."""
        places, rows, num = self._places, self._plan.sample_rows, len(self._plan.sample_rows)
        first: dict[int, Candidates] = {}
        more: dict[int, list[Candidates]] = {}
        for place, each in sorted(found.items()):
            n = places.sampling[place]
            row = int(rows[n])
            if place < num and row not in result.row_errors:
                first[row] = each
            elif place >= num and places.depths[place] < result.num_accepted[n]:
                more.setdefault(row, []).append(each)
        return replace(result, candidates=first, more_candidates=more)

    def _index(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return to_device(values.astype(np.int64), self._runner.rows.state.device)


class GuessingStep(GuessedStep):
    """A plan whose guesses the device makes. What the host has of its rows are bounds; where they
    go on is read, and moved, on the device."""

    def __init__(
        self, runner: StepRunner, plan: Plan, masks: MaskPromise | None, runs: Runs
    ) -> None:
        super().__init__(runner, plan, masks)
        self._runs = runs

    def begin(self) -> None:
        """Give it to the device; nothing is waited for but what plain steps wait for."""
        self._give()

    def is_done(self) -> bool:
        """See Step."""
        return self._arrivals[-1].is_done()

    def end(self) -> StepResult:
        """See Step."""
        tokens_NK1, counts_N, *found = self._arrivals[-1].wait()
        return self._result(found, tokens_NK1.numpy(), counts_N.numpy())

    def _hidden(self) -> torch.Tensor:
        """Let the device guess behind the rows' tokens, and compute the hidden states."""
        plan, longest = self._plan, int((self._plan.computed_bound + self._plan.num_tokens).max())
        rows = np.array([draft.row for draft in plan.drafts], np.int32)
        nums = np.array([len(draft.token_ids) for draft in plan.drafts], np.int32)
        self._runner.rows.ops.guess(rows, nums, longest, self._runs)
        return self._forward_pass(self._runner.backend)

    def _second(self) -> list[torch.Tensor]:
        """Choose at all places and move the counters; returns the tokens that count, how many
        these are, log-probabilities, scores."""
        plan, places, state = self._plan, self._places, self._runner.rows.state
        rows_S, known_S = self._index(plan.rows), self._index(plan.num_tokens - plan.num_drafts)
        at_N = self._index(plan.sample_places)
        contexts_S = state.computed_R[rows_S] + known_S
        lengths_N = contexts_S[at_N]
        which_P, depths_P = self._index(places.sampling), self._index(places.depths)
        chosen_P, *found = self._choose(lengths_N[which_P] + depths_P)
        sampling_N = self._index(plan.sample_rows)
        tries = Tries(places.sampling, places.depths)
        tokens_NK1, counts_N = accept_guesses(state, sampling_N, lengths_N, chosen_P, tries)
        more_N = counts_N.long() - 1
        last_N = tokens_NK1.gather(1, more_N[:, None])[:, 0].clamp(min=0)
        # Who samples from another row's logits guesses nothing, and neither does that row.
        contexts_S = contexts_S.index_add(0, at_N, more_N)
        advance(state, rows_S, contexts_S, sampling_N, lengths_N + more_N, last_N)
        return [tokens_NK1, counts_N, *found]


def accept(plan: Plan, places: Places, chosen_P: npt.NDArray[np.integer]) -> tuple[Int32, Int32]:
    """Find what counts: tokens [N, 1 + K], of which [N] are valid from the left: one, and one more
    for each guess that was right. A row that has none to choose behind a right guess ends with
    that guess; its next step will meet with it."""
    num_samples, most = len(plan.sample_rows), int(places.depths.max())
    tokens_NK1 = np.full((num_samples, 1 + most), NO_TOKEN, np.int32)
    tokens_NK1[places.sampling, places.depths] = chosen_P
    guesses_NK = np.full((num_samples, most), NO_GUESS, np.int32)
    guessed = np.concatenate([draft.token_ids for draft in plan.drafts])
    guesses_NK[places.sampling[num_samples:], places.depths[num_samples:] - 1] = guessed
    is_right_NK = (tokens_NK1[:, :-1] == guesses_NK) & (tokens_NK1[:, 1:] != NO_TOKEN)
    counts_N = 1 + np.logical_and.accumulate(is_right_NK, axis=1).sum(axis=1, dtype=np.int32)
    return tokens_NK1, counts_N
