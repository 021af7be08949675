"""Steps with draft tokens: one forward pass, and one choice at each position (T 4.4.4).

The forward pass computes the draft tokens after each row's last known token, as if they were known.
A row's places are its last known token and its draft tokens. The row samples at all of them at
once, each time from the context up to there. Its sampled tokens count up to the first that differs
from the draft. They are the tokens that it would have sampled without drafts, whatever its
parameters are. Cache entries of rejected draft tokens are overwritten later.

The rows' state on the device defines where they continue, so the device verifies the draft tokens
and moves the counters. A step with draft tokens of the host has ended when `begin` returns. If the
device makes the drafts, the host has only bounds of the rows' lengths. The next step may then be
launched without waiting for this one.

Shape legend: T tokens of the step, S scheduled rows, N sampling rows, K maximum number of draft
tokens of a row, P places: first the places of the sampling rows, then one for each draft token.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.base.masks import MaskPromise
from quire.base.plan import Candidates, Plan, StepResult
from quire.base.settings.config import EngineConfig
from quire.base.settings.speculation import NGRAM, parse_speculation
from quire.ops.attention.states import RecordedInputs
from quire.ops.embedding import select_rows
from quire.ops.host.host_memory import to_device
from quire.ops.rows.row_state import advance
from quire.ops.rows.step_inputs import SampleInputs, gather_step
from quire.ops.sampling.device_drafts import (
    NO_TOKEN,
    DraftPositions,
    Runs,
    accept_drafts,
    draft_runs,
)
from quire.ops.sampling.find_runs import SEARCHED
from quire.runner.attachment import Work
from quire.runner.device import Tensors
from quire.runner.gpu.verification import draft_slots
from quire.runner.sampling.candidates import CandidatesPart
from quire.runner.step_ops import Sampling, SamplingRequests, StepShape
from quire.runner.steps import PlainStep, StepRunner, shape_of

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class SamplingPositions(NamedTuple):
    """Positions where rows sample, arrays [P]. sampling: index of the sampling row. depths: 0, or
    the number of its draft token, from 1. last: index of the step's token. lengths: number of
    tokens known there."""

    rows: Int32
    sampling: Int64
    depths: Int64
    last: Int64
    lengths: Int64


def sampling_positions(plan: Plan) -> SamplingPositions:
    """Return the places of a plan with draft tokens."""
    rows_N, num_samples = plan.sample_rows, len(plan.sample_rows)
    counts = np.array([len(draft.token_ids) for draft in plan.drafts])
    order = np.argsort(rows_N, kind="stable")
    drafted = np.array([draft.row for draft in plan.drafts], np.int32)
    drafting_rows = order[np.searchsorted(rows_N, drafted, sorter=order)].repeat(counts)
    depths = np.arange(1, 1 + len(drafting_rows)) - (np.cumsum(counts) - counts).repeat(counts)
    sampling = np.concatenate([np.arange(num_samples), drafting_rows])
    depths = np.concatenate([np.zeros(num_samples, np.int64), depths])
    scheduled, num_drafted = plan.sample_indices[sampling], plan.num_drafts
    return SamplingPositions(
        rows_N[sampling],
        sampling,
        depths,
        (np.cumsum(plan.num_tokens) - num_drafted - 1)[scheduled] + depths,
        (plan.computed_bound + plan.num_tokens - num_drafted)[scheduled] + depths,
    )


def device_runs(config: EngineConfig) -> Runs | None:
    """Return the search of the drafter on the device; None if only the host drafts."""
    speculation = parse_speculation(config.speculative_config)
    if speculation is None or speculation.method != NGRAM:
        return None
    return Runs(speculation.shortest_run, speculation.longest_run, SEARCHED)


class VerifyStep(PlainStep):
    """Plan with draft tokens on its way through a runner. runs: drafter on the device, for the
    draft tokens that the plan leaves to it. If the model's layers have states, the host settles
    them after a step that is not recorded."""

    def __init__(
        self,
        runner: StepRunner,
        plan: Plan,
        masks: MaskPromise | None,
        runs: Runs | None = None,
    ) -> None:
        super().__init__(runner, plan, masks)
        self._positions, self._runs = sampling_positions(plan), runs
        self._slots: Int64 | None = None  # of the positions in recorded work
        self._retained: RecordedInputs | None = None  # until the rows' states are settled
        self._logits: torch.Tensor | None = None  # of the first half, for the second
        self._scored: list[torch.Tensor] = []

    def begin(self) -> None:
        """Launch the step; wait for it if its draft tokens come from the host."""
        self._launch()
        if not self._plan.is_guessing:
            _, counts_N, *_ = self._chosen.wait()
            if self._retained is not None and self._retained.has_any:
                self._settle_states(self._retained, counts_N.numpy())

    def end(self) -> StepResult:
        """See Step."""
        tokens_NK1, counts_N, *found = self._chosen.wait()
        num, width = len(self._plan.sample_rows), 1 + int(self._positions.depths.max())
        if self._slots is not None:
            found = [tensor[torch.from_numpy(self._slots)] for tensor in found]
        tokens, counts = tokens_NK1.numpy()[:num, :width], counts_N.numpy()[:num]
        return self._result(tokens, counts, found)

    def _launch(self) -> None:
        """Submit the step to the device, as recorded work if there is any."""
        plan, rows, positions = self._plan, self._runner.rows, self._positions
        needs = self._follow(positions.rows)
        if all(part.can_be_recorded for part in self._forward):
            recorded = self._runner.find_recorded(plan, needs, self._runs)
            if recorded is not None:
                self._replay(recorded)
                return
        updates = rows.changes(plan, self._runner.sampler.flags.has_edits)
        self._served = Sampling(
            self._requested, positions.lengths, rows.prompt_lens[positions.rows]
        )
        change, shape = rows.ops.prepare(updates, None), shape_of(plan)
        first = partial(self.first, shape)
        self._give(change, first, self.second, self._served, positions.depths)
        self._chosen = self._arrivals[-1]

    def _replay(self, work: Work) -> None:
        """Submit the step to the device as recorded work, which samples at slots of its own."""
        runner, plan, positions = self._runner, self._plan, self._positions
        flags = runner.sampler.flags
        requested = SamplingRequests(plan.sample_rows, flags.at(plan.sample_rows))
        change, lists = runner.rows.apply(plan, flags.has_edits, requested)
        shape = shape_of(plan, work.num_row_slots)
        self._slots = draft_slots(plan, positions.sampling, positions.depths, work.num_row_slots)

        def first() -> Tensors:
            self._begin_forward()
            return work.first(shape)

        self._give(change, first, work.second, lists.sampling, positions.depths)
        self._chosen = self._arrivals[-1]

    def _begin_forward(self) -> None:
        self._runner.moves.carry_out(self._plan)
        for part in self._forward:
            part.before()

    def _slots_of(self, which: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        return which if self._slots is None else self._slots[which]

    def first(self, shape: StepShape) -> Tensors:
        """Compute logits and the inputs of the sampling parts. Return the tensors that the host
        inspects before the second half."""
        runner, plan, positions = self._runner, self._plan, self._positions
        self._begin_forward()
        hidden_TD = self._hidden(shape)
        if any(part.num_tensors for part in self._forward):
            is_known = np.ones(plan.num_scheduled_tokens, bool)
            is_known[positions.last[positions.depths > 0]] = False
            known_TD = select_rows(hidden_TD, self._index(np.flatnonzero(is_known)))
            self._scored = [each for part in self._forward for each in part.after(known_TD)]
        self._logits = runner.logits(hidden_TD, self._index(positions.last), self._needs)
        return self._seen(self._logits, int(positions.lengths.max()))

    def _hidden(self, shape: StepShape) -> torch.Tensor:
        """Compute the hidden states of all scheduled tokens, [T, D]. The plan's changes brought the
        host's draft tokens; the device's are drafted here."""
        plan, state, backend = self._plan, self._runner.rows.state, self._runner.backend
        longest = int(shape.context_lens.max())
        if plan.is_guessing:
            assert self._runs is not None, "the device's drafter is not set"
            rows = np.array([draft.row for draft in plan.drafts], np.int32)
            nums = np.array([len(draft.token_ids) for draft in plan.drafts], np.int32)
            draft_runs(state, rows, nums, longest, self._runs)
        else:
            self._retained = backend = RecordedInputs(backend, plan.num_drafts > 0)
        num_blocks = -(-longest // state.block_size)
        inputs = gather_step(state, plan.rows, plan.num_tokens, num_blocks)
        return self._runner.hidden(inputs, shape, backend, self._forward)

    def second(self) -> Tensors:
        """Sample at all places, and move the counters unless states must be settled first. Return
        the accepted tokens, their counts, log-probabilities and scores."""
        plan, positions, state = self._plan, self._positions, self._runner.rows.state
        rows_S, known_S = self._index(plan.rows), self._index(plan.num_tokens - plan.num_drafts)
        at_N = self._index(plan.sample_indices)
        contexts_S = state.computed_R[rows_S] + known_S
        lengths_N = contexts_S[at_N]
        which_P, depths_P = self._index(positions.sampling), self._index(positions.depths)
        chosen_P, *found = self._choose(lengths_N[which_P] + depths_P)
        sampling_N = self._index(plan.sample_rows)
        positions_of_drafts = DraftPositions(positions.sampling, positions.depths)
        tokens_NK1, counts_N = accept_drafts(
            state, sampling_N, lengths_N, chosen_P, positions_of_drafts
        )
        more_N = counts_N.long() - 1
        last_N = tokens_NK1.gather(1, more_N[:, None])[:, 0].clamp(min=0)
        # A row that samples from another row's logits has no draft tokens, nor has the other.
        contexts_S = contexts_S.index_add(0, at_N, more_N)
        moved = rows_S, contexts_S, sampling_N, lengths_N + more_N, last_N
        self._advance = partial(advance, state, *moved)
        if self._retained is None or not self._retained.has_any:
            self._advance()
        return [tokens_NK1, counts_N, *found]

    def _choose(self, lengths_P: torch.Tensor) -> list[torch.Tensor]:
        rows, positions, logits_PV = self._runner.rows, self._positions, self._logits
        assert logits_PV is not None, "the first half comes first"
        samples = SampleInputs(
            self._index(positions.rows),
            self._index(positions.last),
            lengths_P,
            self._index(self._served.prompt_lens),
        )
        rows.ops.serve(self._served)
        sampler = self._runner.sampler
        ids_P, is_valid_P = sampler.sample(logits_PV, samples, self._needs, self._sampling)
        found = [tensor for part in self._sampling for tensor in part.found()]
        return [torch.where(is_valid_P, ids_P, NO_TOKEN), *found, *self._scored]

    def _settle_states(self, retained: RecordedInputs, counts_N: Int32) -> None:
        """Advance drafting rows' states past their accepted draft tokens; move the counters."""
        plan = self._plan
        num_tokens = plan.num_tokens - plan.num_drafts
        is_own = np.isin(plan.sample_rows, plan.rows)
        num_tokens[plan.sample_indices[is_own]] += counts_N[is_own] - 1

        def work() -> list[torch.Tensor]:
            retained.settle(num_tokens[plan.num_drafts > 0])
            self._advance()
            return []

        self._arrivals.append(self._runner.device.run(work))
        self._arrivals[-1].wait()

    def _read(self, result: StepResult, arrived: list[torch.Tensor]) -> StepResult:
        """Add candidates to the result."""
        for part in self._sampling:
            if isinstance(part, CandidatesPart):
                is_of_all = self._slots is not None
                found = part.by_position(arrived, is_of_all=is_of_all)
                result = self._with_candidates(result, found)
        return result

    def _with_candidates(self, result: StepResult, found: dict[int, Candidates]) -> StepResult:
        """Add the candidates of the places whose tokens count."""
        positions, rows, num = self._positions, self._plan.sample_rows, len(self._plan.sample_rows)
        first: dict[int, Candidates] = {}
        more: dict[int, list[Candidates]] = {}
        for position, each in sorted(found.items()):
            n = positions.sampling[position]
            row = int(rows[n])
            if position < num and row not in result.row_errors:
                first[row] = each
            elif position >= num and positions.depths[position] < result.num_accepted[n]:
                more.setdefault(row, []).append(each)
        return result.replace(candidates=first, more_candidates=more)

    def _index(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        return to_device(values.astype(np.int64), self._runner.rows.state.device)
