"""Carries out plans: the host gets ready what changes, gives the work to the device, and returns.

On a GPU, which works beside the host:

    host     pack N+1 | launch N+1 |  wait for N's tokens ...
    stream   ...  step N ......... | changes N+1 | moves | step N+1 ...
    side                             tokens of N -> host

A CPU does each piece of work at once, so that a result is there when `launch` returns. A step's
inputs are gathered on the device from the rows' state, its tokens stay there for the next one, and
cross to the host in one place, the device's. A step with token masks is launched in two halves,
between which the host waits for them; the device is busy with the first meanwhile. Counters change
last in a step, so one that could not be launched to its end can be launched again.

Shape legend: T tokens of the step, S scheduled rows (and places for sampling rows), N sampling
rows, D model dim, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from quire.base.config import EngineConfig
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.kept_inputs import KeptInputs
from quire.ops.attention_inputs import AttentionStep
from quire.ops.device_guesses import Runs
from quire.ops.elementwise import select_rows
from quire.ops.host_memory import to_device
from quire.ops.logprobs import named_logprobs, token_logprobs
from quire.ops.row_state import write_tokens
from quire.ops.step_inputs import StepInputs, gather_step
from quire.runner.device import Arrival, Device
from quire.runner.extras import StepExtras
from quire.runner.gpu.graphs import Graphs, Recorded, Size
from quire.runner.gpu.used_sizes import UsedSizes
from quire.runner.graph_sizes import all_graphs_bytes, most_mixed_tokens
from quire.runner.guesses import GuessedStep, Guessing, GuessingStep
from quire.runner.launched import Launched, Settled
from quire.runner.media.media import Media
from quire.runner.media.step_media import StepMedia
from quire.runner.plan_parts import Moves, PromptScores, Scored
from quire.runner.pooler import Pooler
from quire.runner.rows import DeviceRows
from quire.runner.sampler import Sampler, WantedLogprobs, logprob_tensors
from quire.runner.step_ops import (
    NO_UPDATE,
    Gathered,
    Needs,
    StepShape,
    prepared_masks,
)


class DecoderModel(Protocol):
    """What every architecture offers (T 4.3.1). Of a model with three positions for each token
    positions are [3, T]; an id below 0 stands for an encoder output (runner/media)."""

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor: ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    """Rows, model, attention backend and sampler of one device. Whatever `run` or `launch` raises,
    the rows' counters have not moved, and the plan can be carried out again. runs: how the device
    makes guesses that plans leave to it; None: no plan does. pooler: of a model that pools, in the
    place of logits and sampling. media: what the rows' images and videos mean to the model."""

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        rows: DeviceRows,
        sampler: Sampler,
        device: Device,
    ) -> None:
        self.model = model
        self.backend = backend
        self.rows = rows
        self.sampler = sampler
        self.device = device
        self.runs: Runs | None = None
        self.pooler: Pooler | None = None
        self.media = Media()
        self._graphs: Graphs | None = None
        self.moves = Moves(backend)
        self.scores = PromptScores(sampler.vocab_size)
        self._unread: dict[int, Arrival] = {}  # on their way, by result slot
        self._kept: KeptInputs | None = None  # of a step with guesses, until these are settled

    @property
    def is_async(self) -> bool:
        """Return whether `launch` returns before the step has ended."""
        return self.device.is_async

    @property
    def can_record(self) -> bool:
        """Return whether steps can be recorded as graphs."""
        can_hold = self.backend.can_be_recorded and self.rows.ops.can_be_recorded
        return self.device.can_capture and can_hold

    def record(self, *, in_pieces: bool, used: UsedSizes | None = None) -> None:
        """Record steps from now on, and replay them, where that is possible."""
        if self.can_record:
            num_rows = self.rows.max_num_rows
            self._graphs = Graphs(self.device, self, num_rows, in_pieces=in_pieces, used=used)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Record a step that may come; whether there was something left to do."""
        return self._graphs is not None and self._graphs.record_next()

    def graph_bytes(self, config: EngineConfig) -> int:
        """Measure the largest recorded steps' tensors, which the others share, by running them; and
        add what each graph has of its own."""
        if config.enforce_eager or not self.can_record:
            return 0
        device, num_rows = self.device.device, self.rows.max_num_rows
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for size in (Size(num_rows), Size(num_rows, most_mixed_tokens(num_rows))):
            self._carry_out_nothing(size)
        tensors = int(torch.cuda.max_memory_allocated(device) - before)
        return all_graphs_bytes(num_rows, tensors)

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        """Carry out a plan and wait for it."""
        return self.launch(plan, masks).result()

    @torch.inference_mode()
    def launch(self, plan: Plan, masks: MaskPromise | None = None) -> Launched | Guessing | Settled:
        """Put a plan's work behind all before it; one with guesses of the host's is waited for.
        masks: which tokens its masked rows may choose."""
        if plan.is_guessing:
            return GuessingStep(self, plan, masks).launch()
        if plan.drafts:
            return Settled(GuessedStep(self, plan, masks).run())
        media = self.start_and_release(plan)
        rows, sampler = self.rows, self.sampler
        asked = sampler.asked(plan.sample_rows, plan.masked_rows)
        needs, wanted = sampler.needs(asked), sampler.wanted(asked)
        # Perhaps now, before the lists are this plan's.
        recorded = self._recorded(plan, needs, media)
        update, slot = rows.apply(plan, sampler.flags.has_edits, asked)
        if (before := self._unread.pop(slot, None)) is not None:
            before.wait()
        scores = self.scores.of(plan, rows.prompt_lens)
        tokens_N = rows.result(slot, len(plan.sample_rows))
        shape = shape_of(plan, 0 if recorded is None else recorded.size.rows)
        extras = asked.extras
        step = recorded or self._step(plan, needs, wanted, scores, extras, media)

        def begin() -> list[torch.Tensor]:
            self.moves.carry_out(plan)
            media.encode()
            return step.begin(shape) if len(plan.rows) else []

        def end() -> list[torch.Tensor]:
            return [tokens_N, *(step.end() if len(plan.rows) else [])]

        if not needs.has_masks and (extras is None or not extras.hosted):
            arrival, forward, errors = rows.run_with(update, lambda: [*begin(), *end()]), None, {}
        else:
            forward = rows.run_with(update, begin)
            errors = dict[int, str]()
            if extras is not None and extras.hosted:
                errors = self._look_at(plan, extras, forward.wait())
            then, wrong = NO_UPDATE, dict[int, str]()
            if needs.has_masks:
                then, wrong = prepared_masks(rows.ops, asked, masks)
            arrival, errors = rows.run_with(then, end), errors | wrong
        if not arrival.is_done():
            self._unread[slot] = arrival
        is_recorded = recorded is not None
        pools = self.pooler is not None
        return Launched(plan, arrival, asked, wanted, scores, is_recorded, forward, errors, pools)

    def _step(
        self,
        plan: Plan,
        needs: Needs,
        wanted: list[WantedLogprobs],
        scores: Sequence[Scored],
        extras: StepExtras | None,
        media: StepMedia,
    ) -> "_Step | _PoolingStep":
        """Make the two halves of a step that is launched as it is."""
        if self.pooler is not None:
            return _PoolingStep(self, self.pooler, plan, media)
        return _Step(self, needs, wanted, scores, extras, media)

    def _look_at(self, plan: Plan, extras: StepExtras, seen: list[torch.Tensor]) -> dict[int, str]:
        """Let the host find out what extras change; returns what is wrong with rows."""
        lengths = plan.computed_bound + plan.num_tokens
        extras.take(seen, lengths[plan.sample_places], self.rows.prompt_lens[plan.sample_rows])
        return extras.errors

    def start_and_release(self, plan: Plan) -> StepMedia:
        """Note which rows a plan starts, forks and releases, and what they ask for; returns what
        their media mean to the step."""
        self.scores.start_and_release(plan)
        if len(plan.released):
            self.sampler.release_rows(plan.released)
        for start in plan.started:
            self.sampler.start_row(start)
        for fork in plan.forked:
            self.sampler.copy_row(fork.parent, fork.child)
        return self.media.prepare(plan)

    def _recorded(self, plan: Plan, needs: Needs, media: StepMedia) -> Recorded | None:
        """Find the graph that has room for a plan's step."""
        num_rows, num_tokens = len(plan.rows), plan.num_scheduled_tokens
        if (
            self._graphs is None
            or num_rows == 0
            or not media.can_be_recorded
            or self.scores.may_have(plan, self.rows.prompt_lens)
        ):
            return None
        num_places = max(num_rows, len(plan.sample_rows))
        return self._graphs.find(num_places, 0 if num_tokens == num_rows else num_tokens, needs)

    @torch.inference_mode()
    def _carry_out_nothing(self, size: Size) -> None:
        """Carry out a step with places of this size, and without rows."""
        shape = self.largest_shape(size)

        def work() -> list[torch.Tensor]:
            self.carry_out(self.gather(shape), shape, Needs(has_filters=True), self.backend)
            return []

        self.expect_nothing()
        self.device.run(work).wait()

    def expect_nothing(self) -> None:
        """Get ready for a step without rows: for what is recorded."""
        self.rows.expect_nothing()

    def largest_shape(self, size: Size) -> StepShape:
        """Return the shape of the step that takes most, of those that a size has room for: of a
        mixed one's rows the first has all tokens."""
        query_lens = np.ones(size.rows, np.int32)
        if size.is_mixed:
            query_lens[:] = size.tokens, *[0] * (size.rows - 1)
        context_lens = np.full(size.rows, self.rows.max_model_len, np.int32)
        return StepShape(query_lens, context_lens, size.rows)

    def forward(self, plan: Plan, media: StepMedia) -> torch.Tensor:
        """Compute the hidden states of a plan with guesses, [T, D] (guesses.py)."""
        state, shape = self.rows.state, shape_of(plan)
        longest = int(shape.context_lens.max())
        backend: AttentionBackend = self.backend
        if plan.is_guessing:
            assert self.runs is not None, "the device's drafter is not set"
            rows = np.array([draft.row for draft in plan.drafts], np.int32)
            nums = np.array([len(draft.token_ids) for draft in plan.drafts], np.int32)
            self.rows.ops.guess(rows, nums, longest, self.runs)
        else:
            end_of = dict(zip(plan.rows.tolist(), shape.context_lens.tolist(), strict=True))
            for draft in plan.drafts:
                begin = end_of[draft.row] - len(draft.token_ids)
                write_tokens(state, draft.row, begin, draft.token_ids)
            self._kept = backend = KeptInputs(self.backend, plan.num_drafts > 0)
        num_blocks = -(-longest // state.block_size)
        inputs = gather_step(state, plan.rows, plan.num_tokens, num_blocks)
        return self.hidden(inputs, shape, backend, media)

    def settle_states(self, plan: Plan, contexts_S: npt.NDArray[np.int64]) -> float:
        """Leave the states of rows that guess behind so many tokens (guesses.py)."""
        kept, self._kept = self._kept, None
        if kept is None or not kept.has_any:
            return 0.0
        num_tokens = (contexts_S - plan.computed_bound)[plan.num_drafts > 0].astype(np.int32)

        def work() -> list[torch.Tensor]:
            kept.settle(num_tokens)
            return []

        arrival = self.device.run(work)
        arrival.wait()
        return arrival.duration_s()

    def hidden(
        self, inputs: StepInputs, shape: StepShape, backend: AttentionBackend, media: StepMedia
    ) -> torch.Tensor:
        """Compute the hidden states of a step, [T, D], behind the last norm."""
        backend.prepare(media.attention_step(self.attention_step(inputs, shape)))
        return self.model(*media.model_inputs(inputs), backend)

    def logits(self, hidden_RD: torch.Tensor, needs: Needs) -> torch.Tensor:
        """Compute as many logits as sampling needs, [R, V] or a rank's part of them."""
        return self.sampler.vocabulary.needed(self.model.logits(hidden_RD), needs)

    def gather(self, shape: StepShape) -> Gathered:
        """Gather the inputs of the step that comes next."""
        return self.rows.ops.gather(shape)

    def attention_step(self, inputs: StepInputs, shape: StepShape) -> AttentionStep:
        """Return what attention needs of a step whose inputs are gathered there."""
        return AttentionStep(
            positions_T=inputs.positions_T,
            query_starts_S1=inputs.query_starts_S1,
            context_lens_S=inputs.context_lens_S,
            slots_T=inputs.slots_T,
            block_tables_SL=inputs.block_tables_SL,
            query_lens_host=shape.query_lens,
            context_lens_host=shape.context_lens,
        )

    def carry_out(
        self,
        gathered: Gathered,
        shape: StepShape,
        needs: Needs,
        backend: AttentionBackend,
        between: Callable[[], None] = lambda: None,
    ) -> list[torch.Tensor]:
        """Do the work of a step, from gathered inputs to counters, for a graph; returns the
        log-probabilities of all rows, where some want any. between: called where masks come in."""
        begun = self.begin(gathered, shape, needs, backend)
        if needs.has_masks:
            between()
        return self.end(begun, needs, None, None)

    def begin(
        self,
        gathered: Gathered,
        shape: StepShape,
        needs: Needs,
        backend: AttentionBackend,
        scores: Sequence[Scored] = (),
        media: StepMedia | None = None,
    ) -> "Begun":
        """Do the first half of a step's work, up to logits and scores. media: None without any."""
        inputs, samples = gathered.inputs, gathered.samples
        hidden_TD = self.hidden(inputs, shape, backend, media or self.media.nothing)
        scored = self.score(hidden_TD, scores)
        if not shape.num_samples:
            return Begun(gathered, None, scored)
        logits_NV = self.logits(select_rows(hidden_TD, samples.last), needs)
        return Begun(gathered, logits_NV, scored)

    def end(
        self,
        begun: "Begun",
        needs: Needs,
        wanted: list[WantedLogprobs] | None,
        extras: StepExtras | None,
    ) -> list[torch.Tensor]:
        """Choose tokens and, last of all, move the counters; returns the log-probabilities that
        rows wanted, then the scores."""
        samples, found = begun.gathered.samples, list[torch.Tensor]()
        ids_N, is_valid_N = samples.rows, samples.rows
        if begun.logits_NV is not None:
            logits_NV = begun.logits_NV
            found_N = self.sampler.sample(logits_NV, samples, needs, wanted, extras)
            ids_N, is_valid_N, found = found_N
        self.rows.advance(begun.gathered, ids_N, is_valid_N)
        return found + begun.scored

    def score(self, hidden_TD: torch.Tensor, scores: Sequence[Scored]) -> list[torch.Tensor]:
        """Tell log-probabilities of prompts, from hidden states of all tokens of a step."""
        return [tensor for part in scores for tensor in self._score(hidden_TD, part)]

    def _score(self, hidden_TD: torch.Tensor, part: Scored) -> list[torch.Tensor]:
        """Tell log-probabilities of the prompt tokens that follow some positions of the step."""
        found = self.model.logits(hidden_TD[part.place : part.place + part.count])
        logits = self.sampler.vocabulary.whole(found)
        targets = self.rows.state.tokens_RM[part.row, part.first + 1 : part.last + 1].long()
        if part.named is None:
            return logprob_tensors(token_logprobs(logits, targets, part.num))
        named = to_device(part.named.ids, logits.device)
        return logprob_tensors(named_logprobs(logits, targets, named))


@dataclass(frozen=True)
class Begun:
    """The first half of a step. logits: None if no row samples; scored: tensors of the scores."""

    gathered: Gathered
    logits_NV: torch.Tensor | None
    scored: list[torch.Tensor]


@dataclass
class _Step:
    """A step that is launched as it is, in the two halves of `Recorded`."""

    runner: ModelRunner
    needs: Needs
    wanted: list[WantedLogprobs]
    scores: Sequence[Scored]
    extras: StepExtras | None
    media: StepMedia
    begun: list[Begun] = field(default_factory=list)

    def begin(self, shape: StepShape) -> list[torch.Tensor]:
        """Return what the host looks at before the other half."""
        runner = self.runner
        gathered = runner.gather(shape)
        begun = runner.begin(gathered, shape, self.needs, runner.backend, self.scores, self.media)
        self.begun = [begun]
        if self.extras is None or not self.extras.hosted or begun.logits_NV is None:
            return []
        return self.extras.seen(begun.logits_NV, int(shape.context_lens.max()))

    def end(self) -> list[torch.Tensor]:
        return self.runner.end(self.begun.pop(), self.needs, self.wanted, self.extras)


@dataclass
class _PoolingStep:
    """A step of a model that pools: rows that end get the token 0, which says nothing."""

    runner: ModelRunner
    pooler: Pooler
    plan: Plan
    media: StepMedia
    begun: list[tuple[Gathered, torch.Tensor]] = field(default_factory=list)

    def begin(self, shape: StepShape) -> list[torch.Tensor]:
        runner = self.runner
        gathered = runner.gather(shape)
        hidden_TD = runner.hidden(gathered.inputs, shape, runner.backend, self.media)
        self.begun = [(gathered, self.pooler.take(self.plan, hidden_TD))]
        return []

    def end(self) -> list[torch.Tensor]:
        """Move the counters; what the prompts came to."""
        gathered, pooled_NK = self.begun.pop()
        is_valid_N = pooled_NK.isfinite().all(1)
        self.runner.rows.advance(
            gathered, torch.zeros_like(is_valid_N, dtype=torch.int64), is_valid_N
        )
        return [pooled_NK]


def shape_of(plan: Plan, num_places: int = 0) -> StepShape:
    """Return the shape of a plan's step, with as many places for rows (0: one for each)."""
    num_rows = len(plan.rows)
    query_lens, context_lens = np.zeros((2, num_places or num_rows), np.int32)
    query_lens[:num_rows] = plan.num_tokens
    context_lens[:num_rows] = plan.computed_bound + plan.num_tokens
    return StepShape(query_lens, context_lens, len(plan.sample_rows))
