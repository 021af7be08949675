"""Carries out plans on a GPU: the host packs what changes, launches, and returns.

    host     pack N+1 | launch N+1 |  wait for N's tokens ...
    stream   ...  step N ......... | changes N+1 | moves | step N+1 ...
    side                             tokens of N -> host

A step's inputs are gathered on the device from the rows' state, its tokens stay there for the next
one, and cross to the host beside it. Counters change last in a step, so one that could not be
launched to its end can be launched again.

Shape legend: T tokens of the step, S scheduled rows (and places for sampling rows), N sampling
rows, D model dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.base.config import EngineConfig
from quire.base.plan import Candidates, Plan, StepResult
from quire.ops.attention.base import AttentionBackend, AttentionStep
from quire.ops.kernels.logprobs import token_logprobs
from quire.ops.kernels.step_inputs import StepBuffers, advance, gather_step
from quire.ops.logprobs import TokenLogprobs
from quire.ops.select_rows import select_rows
from quire.runner.gpu.device import Arrival, Device
from quire.runner.gpu.graphs import Graphs, Recorded, Size
from quire.runner.gpu.rows import GpuRows
from quire.runner.gpu.sampler import NOBODY, GpuSampler, Needs, Wanted, as_candidates
from quire.runner.gpu.shape import Shape
from quire.runner.gpu.used_sizes import UsedSizes
from quire.runner.graph_sizes import all_graphs_bytes, most_mixed_tokens
from quire.runner.model_runner import DecoderModel
from quire.runner.plan_parts import Moves, PromptScores, Scored
from quire.runner.sampler import describe_failures, to_candidates
from quire.runner.sampling_facts import NO_LOGPROBS


@dataclass(frozen=True)
class Launched:
    """A step on its way. tokens come first of what arrives, then candidates, then scores."""

    plan: Plan
    arrival: Arrival
    needs: Needs
    wanted: Wanted
    edited: frozenset[int]
    scores: list[Scored]

    def is_done(self) -> bool:
        return self.arrival.is_done()

    def result(self) -> StepResult:
        """Waits for it. Raises what the device has met with meanwhile; then it cannot go on."""
        tokens_N, *rest = self.arrival.wait()
        num_samples = len(self.plan.sample_rows)
        tokens = tokens_N.numpy()[:num_samples].reshape(-1, 1).copy()
        failed = self.plan.sample_rows[tokens[:, 0] < 0].tolist()
        candidates: dict[int, Candidates] = {}
        if self.needs.num_candidates != NO_LOGPROBS:
            found, rest = TokenLogprobs(*rest[:3]), rest[3:]
            candidates = as_candidates(found, self.needs, self.wanted)
        return StepResult(
            step_id=self.plan.step_id,
            token_ids=np.maximum(tokens, 0),
            num_accepted=np.ones(num_samples, np.int32),
            candidates={row: item for row, item in candidates.items() if row not in failed},
            prompt_candidates=self._prompt_candidates(rest),
            row_errors=describe_failures(failed, self.edited),
            unservable_rows=tuple(row for row in failed if row in self.edited),
            duration_s=self.arrival.duration_s(),
        )

    def _prompt_candidates(self, arrived: list[torch.Tensor]) -> dict[int, list[Candidates]]:
        found: dict[int, list[Candidates]] = {}
        for i, part in enumerate(self.scores):
            scored = TokenLogprobs(*arrived[3 * i : 3 * i + 3])
            items = to_candidates(scored, np.full(part.count, part.num))
            found.setdefault(part.row, []).extend(items)
        return found


class GpuRunner:
    """Rows, model, attention backend and sampler of one GPU."""

    launches = True

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        rows: GpuRows,
        sampler: GpuSampler,
        device: Device,
    ) -> None:
        self.model = model
        self.backend = backend
        self.rows = rows
        self.sampler = sampler
        self.device = device
        self._graphs: Graphs | None = None
        self._moves = Moves(backend)
        self._scores = PromptScores(sampler.vocab_size)
        self._results: dict[int, Arrival] = {}  # by result slot

    def record(self, *, in_pieces: bool, used: UsedSizes | None = None) -> None:
        """From now on record steps, and replay them."""
        if self.device.can_capture:
            num_rows = self.rows.max_num_rows
            self._graphs = Graphs(self.device, self, num_rows, in_pieces=in_pieces, used=used)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Record a step that may come."""
        return self._graphs is not None and self._graphs.record_next()

    def graph_bytes(self, config: EngineConfig) -> int:
        """The largest recorded steps' tensors, measured by running them, which the others share;
        and what each graph has of its own."""
        if config.enforce_eager or not self.device.can_capture:
            return 0
        device, num_rows = self.device.device, self.rows.max_num_rows
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        for size in (Size(num_rows), Size(num_rows, most_mixed_tokens(num_rows))):
            self._carry_out_nothing(size)
        tensors = int(torch.cuda.max_memory_allocated(device) - before)
        return all_graphs_bytes(num_rows, tensors)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched:
        """Put a plan's work behind all before it. Whatever this raises, the rows' counters have not
        moved."""
        self._start_and_release(plan)
        needs = self.sampler.needs(plan.sample_rows)
        wanted = self.sampler.wanted(plan.sample_rows)
        recorded = self._recorded(plan, needs)  # perhaps now, before the inbox is this plan's
        facts = self.sampler.facts
        packed = self.rows.apply(plan, lambda row: bool(facts.has_edits[row]))
        slot = packed.result_slot
        if slot in self._results:
            self._results[slot].wait()
        scores = self._scores.of(plan, self.rows.prompt_lens)
        tokens_N = self.rows.results_QS[slot, : len(plan.sample_rows)]
        shape = self._shape(plan, 0 if recorded is None else recorded.size.rows)

        def work() -> list[torch.Tensor]:
            self._moves.carry_out(plan)
            if recorded is not None:
                return [tokens_N, *recorded.replay(shape)]
            if len(plan.rows) == 0:
                return [tokens_N]
            buffers = self.buffers(shape)
            found = self.carry_out(buffers, shape, needs, self.backend, wanted, scores)
            return [tokens_N, *found]

        arrival = self._results[slot] = self.rows.run_with(packed, work)
        edited = frozenset(plan.sample_rows[facts.has_edits[plan.sample_rows]].tolist())
        return Launched(plan, arrival, needs, wanted, edited, scores)

    def run(self, plan: Plan) -> StepResult:
        """Launch a plan and wait for it."""
        return self.launch(plan).result()

    def _recorded(self, plan: Plan, needs: Needs) -> Recorded | None:
        """The graph that has room for a plan's step."""
        num_rows, num_tokens = len(plan.rows), plan.num_scheduled_tokens
        if (
            self._graphs is None
            or num_rows == 0
            or self._scores.may_have(plan, self.rows.prompt_lens)
        ):
            return None
        num_places = max(num_rows, len(plan.sample_rows))
        return self._graphs.find(num_places, 0 if num_tokens == num_rows else num_tokens, needs)

    def _start_and_release(self, plan: Plan) -> None:
        self._scores.start_and_release(plan)
        if len(plan.released):
            self.sampler.release_rows(plan.released)
        for start in plan.started:
            self.sampler.start_row(start)
        for fork in plan.forked:
            self.sampler.copy_row(fork.parent, fork.child)

    def _shape(self, plan: Plan, size: int = 0) -> Shape:
        """Of a plan's step, with places for all sampling rows, or for `size` rows."""
        num_rows = len(plan.rows)
        num_places = size or max(num_rows, len(plan.sample_rows))
        query_lens, context_lens = np.zeros((2, num_places), np.int32)
        query_lens[:num_rows] = plan.num_tokens
        context_lens[:num_rows] = plan.computed_bound + plan.num_tokens
        return Shape(query_lens, context_lens, len(plan.sample_rows))

    def expect_nothing(self) -> None:
        """A step without rows comes next: for what is recorded."""
        self.rows.empty_inbox()

    @torch.inference_mode()
    def _carry_out_nothing(self, size: Size) -> None:
        """A step with places of this size, and without rows."""
        shape = self.largest_shape(size)

        def work() -> list[torch.Tensor]:
            self.carry_out(self.buffers(shape), shape, Needs(has_filters=True), self.backend)
            return []

        self.expect_nothing()
        self.device.run(work).wait()

    def largest_shape(self, size: Size) -> Shape:
        """Of steps that a size has room for, one that takes most."""
        max_len = self.rows.state.tokens_RM.shape[1]
        query_lens = np.ones(size.rows, np.int32)
        query_lens[0] += max(size.tokens - size.rows, 0)
        return Shape(query_lens, np.full(size.rows, max_len, np.int32), size.rows)

    def buffers(self, shape: Shape) -> StepBuffers:
        """Memory for the inputs of a step of this shape."""
        state = self.rows.state
        longest = -(-int(shape.context_lens.max()) // state.block_size)
        num_groups, device = len(state.tables_GRL), state.tokens_RM.device
        sizes = shape.num_tokens, len(shape.query_lens), num_groups, longest
        return StepBuffers.empty(*sizes, device)

    def attention_step(self, buffers: StepBuffers, shape: Shape) -> AttentionStep:
        """What attention needs of a step whose inputs are gathered there."""
        inputs = buffers.inputs
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
        buffers: StepBuffers,
        shape: Shape,
        needs: Needs,
        backend: AttentionBackend,
        wanted: Wanted = NOBODY,
        scores: Sequence[Scored] = (),
    ) -> list[torch.Tensor]:
        """The work of a step, from gathered inputs to counters; returns what rows wanted (all rows,
        if that can be recorded), then the scores."""
        gather_step(self.rows.state, self.rows.inbox, buffers)
        backend.prepare(self.attention_step(buffers, shape))
        hidden_TD = self.model(buffers.ids_T, buffers.positions_T, backend)
        scored = [tensor for part in scores for tensor in self._score(hidden_TD, part)]
        return self._end(buffers, hidden_TD, shape, needs, wanted) + scored

    def _end(
        self,
        buffers: StepBuffers,
        hidden_TD: torch.Tensor,
        shape: Shape,
        needs: Needs,
        wanted: Wanted,
    ) -> list[torch.Tensor]:
        """Choose tokens and move the counters."""
        samples, wishes = buffers.first_samples(shape.num_samples), list[torch.Tensor]()
        ids_N, is_valid_N, rows = samples.rows, samples.rows, self.rows
        if shape.num_samples:
            logits_NV = self.model.logits(select_rows(hidden_TD, samples.last))
            ids_N, is_valid_N = self.sampler.choose(logits_NV, samples, needs)
            if needs.num_candidates != NO_LOGPROBS:
                found = self.sampler.logprobs(logits_NV, ids_N, needs, wanted)
                wishes = [found.token_ids, found.logprobs, found.ranks]
        contexts_S = buffers.context_lens_S
        advance(rows.state, rows.inbox, contexts_S, ids_N, is_valid_N, rows.results_QS)
        return wishes

    def _score(self, hidden_TD: torch.Tensor, part: Scored) -> list[torch.Tensor]:
        logits = self.model.logits(hidden_TD[part.place : part.place + part.count])
        targets = self.rows.state.tokens_RM[part.row, part.first + 1 : part.last + 1].long()
        found = token_logprobs(logits, targets, part.num)
        return [found.token_ids, found.logprobs, found.ranks]
