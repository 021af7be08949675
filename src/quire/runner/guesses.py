"""Steps with guesses: one forward pass, and one choice at each place (T 4.4.4).

The forward pass computes the guesses behind each row's last known token, as if they were known. A
row's places are this token and its guesses, and the row chooses at all of them at once, each time
by what it would have known there. What it has chosen counts up to the first that is not the guess:
those are the tokens that it would have chosen without guesses, whatever it asks for. What wrong
guesses have left in the cache is written again.

Guesses of the host follow known tokens, and the host judges them and moves the counters: such a
step is waited for (`GuessedStep`). Where the device makes them it judges them, too, by what its
rows hold, and the next step may be launched behind this one (`GuessingStep`).

Shape legend: T tokens of the step, S scheduled rows, N sampling rows, K most guesses of a row, P
places: the sampling rows' own, then those of all guesses.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.base.masks import MaskPromise
from quire.base.plan import Candidates, Plan, StepResult
from quire.ops.device_guesses import NO_GUESS, NO_TOKEN, Tries, accept_guesses
from quire.ops.elementwise import select_rows
from quire.ops.host_memory import to_device
from quire.ops.row_state import advance
from quire.ops.step_inputs import SampleInputs
from quire.runner.device import Arrival
from quire.runner.launched import read_candidates, read_scores
from quire.runner.media.step_media import StepMedia
from quire.runner.plan_parts import Moves, PromptScores, Scored
from quire.runner.row_errors import reasons_of, unservable
from quire.runner.rows import DeviceRows
from quire.runner.sampler import Sampler, WantedLogprobs
from quire.runner.step_ops import NO_UPDATE, Asked, Needs, Sampling, prepared_masks

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class Parts(Protocol):
    """What of a runner a step with guesses is made of."""

    rows: DeviceRows
    sampler: Sampler
    moves: Moves
    scores: PromptScores

    def start_and_release(self, plan: Plan) -> StepMedia:
        """Note which rows a plan starts, forks and releases; returns what their media mean to the
        step."""
        ...

    def forward(self, plan: Plan, media: StepMedia) -> torch.Tensor:
        """Write a plan's guesses behind its rows' tokens and compute the hidden states of all that
        it schedules, [T, D]."""
        ...

    def settle_states(self, plan: Plan, contexts_S: Int64) -> float:
        """Leave the states of a plan's rows that guess, behind so many tokens of each of its rows;
        returns the seconds that it took."""
        ...

    def logits(self, hidden_RD: torch.Tensor, needs: Needs) -> torch.Tensor:
        """Compute as many logits as sampling needs, [R, V] or a rank's part of them."""
        ...

    def score(self, hidden_TD: torch.Tensor, scores: Sequence[Scored]) -> list[torch.Tensor]:
        """Tell log-probabilities of prompts."""
        ...


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


class GuessedStep:
    """A plan with guesses on its way through a runner; nothing is behind it before it has ended."""

    def __init__(self, parts: Parts, plan: Plan, masks: MaskPromise | None) -> None:
        self._media = parts.start_and_release(plan)
        self._parts, self._plan, self._masks = parts, plan, masks
        self._places = places = places_of(plan)
        self._prompt_lens = np.empty(0, np.int64)  # of the places' rows
        sampler = parts.sampler
        self._asked: Asked = sampler.asked(places.rows, plan.masked_rows)
        self._needs: Needs = sampler.needs(self._asked)
        self._wanted: list[WantedLogprobs] = sampler.wanted(self._asked)
        self._scores: list[Scored] = []
        self._scored: list[torch.Tensor] = []
        self._logits: torch.Tensor | None = None  # of the first half, for the other
        self._told: dict[int, str] = {}  # what is wrong with rows

    def run(self) -> StepResult:
        """Carry it out; the rows' counters move last of all."""
        arrivals = self._give()
        arrived = arrivals[-1].wait()
        tokens_NK1, counts_N = accept(self._plan, self._places, arrived[0].numpy())
        seconds = self._settle(tokens_NK1, counts_N)
        result = self._result(arrived[1:], tokens_NK1, counts_N)
        seconds += sum(arrival.duration_s() for arrival in arrivals)
        return dataclasses.replace(result, duration_s=seconds)

    def _give(self) -> list[Arrival]:
        """Give it to the device, in two halves if the host has something to do between them."""
        plan, rows = self._plan, self._parts.rows
        updates = rows.changes(plan, self._parts.sampler.flags.has_edits)
        self._prompt_lens = rows.prompt_lens[self._places.rows]
        self._scores = self._parts.scores.of(plan.without_drafts, rows.prompt_lens)
        change, extras = rows.ops.prepare(updates, None), self._asked.extras
        if not self._needs.has_masks and (extras is None or not extras.hosted):
            return [rows.run_with(change, lambda: [*self._begin(), *self._end()])]
        first = rows.run_with(change, self._begin)
        seen = first.wait()
        if extras is not None and extras.hosted:
            extras.take(seen, self._places.lengths, self._prompt_lens)
            self._told |= extras.errors
        then = NO_UPDATE
        if self._needs.has_masks:
            depths = self._places.depths
            then, wrong = prepared_masks(rows.ops, self._asked, self._masks, depths)
            self._told |= wrong
        return [first, rows.run_with(then, self._end)]

    def _begin(self) -> list[torch.Tensor]:
        """Compute logits and scores; returns what the host looks at before the other half."""
        parts, extras, places = self._parts, self._asked.extras, self._places
        parts.moves.carry_out(self._plan)
        self._media.encode()
        hidden_TD = parts.forward(self._plan, self._media)
        if self._scores:
            is_known = np.ones(self._plan.num_scheduled_tokens, bool)
            is_known[places.last[places.depths > 0]] = False
            known_TD = _rows(hidden_TD, np.flatnonzero(is_known))
            self._scored = parts.score(known_TD, self._scores)
        self._logits = parts.logits(_rows(hidden_TD, places.last), self._needs)
        if extras is None or not extras.hosted:
            return []
        return extras.seen(self._logits, int(places.lengths.max()))

    def _end(self) -> list[torch.Tensor]:
        """Choose at all places: returns the tokens, log-probabilities, scores."""
        return self._choose(to_device(self._places.lengths, self._parts.rows.state.device))

    def _choose(self, lengths_P: torch.Tensor) -> list[torch.Tensor]:
        rows, places, logits_PV = self._parts.rows, self._places, self._logits
        assert logits_PV is not None, "the first half comes first"
        numbers = places.rows.astype(np.int64), places.last, self._prompt_lens
        rows_P, last_P, prompt_lens_P = (to_device(each, lengths_P.device) for each in numbers)
        samples = SampleInputs(rows_P, last_P, lengths_P, prompt_lens_P)
        rows.ops.serve(Sampling(self._asked, places.lengths, self._prompt_lens))
        ids_P, is_valid_P, found = self._parts.sampler.sample(
            logits_PV, samples, self._needs, self._wanted, self._asked.extras
        )
        return [torch.where(is_valid_P, ids_P, NO_TOKEN), *found, *self._scored]

    def _settle(self, tokens_NK1: Int32, counts_N: Int32) -> float:
        """Store the last token of each row, behind the guesses that were right, leave states there,
        and move the counters; returns the seconds that the states took."""
        plan, places, rows = self._plan, self._places, self._parts.rows
        last_N = tokens_NK1[np.arange(len(counts_N)), counts_N - 1]
        lengths_N = places.lengths[: len(counts_N)] + counts_N - 1
        contexts_S = (plan.computed_bound + plan.num_tokens - plan.num_drafts).astype(np.int64)
        is_own = np.isin(plan.sample_rows, plan.rows)
        contexts_S[plan.sample_places[is_own]] += counts_N[is_own] - 1
        seconds = self._parts.settle_states(plan, contexts_S)
        rows.settle(plan.rows, contexts_S, plan.sample_rows, lengths_N, np.maximum(last_N, 0))
        return seconds

    def _result(
        self, arrived: list[torch.Tensor], tokens_NK1: Int32, counts_N: Int32
    ) -> StepResult:
        num_scores = 3 * len(self._scores)
        found = arrived[: len(arrived) - num_scores]
        rows = self._plan.sample_rows
        reasons = reasons_of(rows, tokens_NK1[:, 0], self._asked, self._told)
        at = read_candidates(found, self._wanted)
        has_any = [row not in reasons for row in rows.tolist()]
        candidates = {int(rows[n]): each for n, each in at.items() if n < len(rows) and has_any[n]}
        more: dict[int, list[Candidates]] = {}
        for place in sorted(at.keys() - range(len(rows))):
            n = self._places.sampling[place]
            if self._places.depths[place] < counts_N[n]:
                more.setdefault(int(rows[n]), []).append(at[place])
        return StepResult(
            self._plan.step_id,
            token_ids=np.maximum(tokens_NK1, 0),
            num_accepted=counts_N,
            candidates=candidates,
            prompt_candidates=read_scores(arrived[len(found) :], self._scores),
            row_errors=reasons,
            unservable_rows=unservable(reasons),
            more_candidates=more,
        )


class GuessingStep(GuessedStep):
    """A plan whose guesses the device makes. What the host has of its rows are bounds; where they
    go on is read, and moved, on the device."""

    def launch(self) -> "Guessing":
        """Give it to the device; nothing is waited for but what plain steps wait for."""
        return Guessing(self, self._give())

    def _end(self) -> list[torch.Tensor]:
        """Choose at all places and move the counters; returns the tokens that count, how many
        these are, log-probabilities, scores."""
        plan, places, state = self._plan, self._places, self._parts.rows.state
        num_known = (plan.num_tokens - plan.num_drafts).astype(np.int64)
        rows, at = plan.rows.astype(np.int64), plan.sample_places
        rows_S, known_S = to_device(rows, state.device), to_device(num_known, state.device)
        at_N = to_device(at, state.device)
        contexts_S = state.computed_R[rows_S] + known_S
        lengths_N = contexts_S[at_N]
        which_P, depths_P = (
            to_device(each, state.device) for each in (places.sampling, places.depths)
        )
        chosen_P, *found = self._choose(lengths_N[which_P] + depths_P)
        sampling_N = to_device(plan.sample_rows.astype(np.int64), state.device)
        tries = Tries(places.sampling, places.depths)
        tokens_NK1, counts_N = accept_guesses(state, sampling_N, lengths_N, chosen_P, tries)
        more_N = counts_N.long() - 1
        last_N = tokens_NK1.gather(1, more_N[:, None])[:, 0].clamp(min=0)
        # Who samples from another row's logits guesses nothing, and neither does that row.
        contexts_S = contexts_S.index_add(0, at_N, more_N)
        advance(state, rows_S, contexts_S, sampling_N, lengths_N + more_N, last_N)
        return [tokens_NK1, counts_N, *found]

    def result(self, arrivals: Sequence[Arrival]) -> StepResult:
        """Wait for it. Raises what the device has met with."""
        tokens_NK1, counts_N, *found = arrivals[-1].wait()
        result = self._result(found, tokens_NK1.numpy(), counts_N.numpy())
        seconds = sum(arrival.duration_s() for arrival in arrivals)
        return dataclasses.replace(result, duration_s=seconds)


@dataclass(frozen=True)
class Guessing:
    """Such a step on its way."""

    step: GuessingStep
    arrivals: list[Arrival]

    def is_done(self) -> bool:
        return self.arrivals[-1].is_done()

    def result(self) -> StepResult:
        return self.step.result(self.arrivals)


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


def _rows(values: torch.Tensor, places: npt.NDArray[np.integer]) -> torch.Tensor:
    return select_rows(values, to_device(places.astype(np.int64), values.device))
