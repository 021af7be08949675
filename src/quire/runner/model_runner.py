"""Carries out plans: deltas, forward pass over the concatenated tokens of a step, sampling.

One code path for all devices. Values come back from the device in one named place, `_to_host`.
Shape legend: T tokens of the step, N sampling rows, D model dim, V vocabulary.
"""

import time
from typing import Protocol

import numpy as np
import torch

from quire.base.config import EngineConfig
from quire.base.plan import Candidates, Plan, StepResult
from quire.ops.attention.base import AttentionBackend
from quire.ops.select_rows import select_rows
from quire.runner.launched import Finished, Pending
from quire.runner.plan_parts import Moves, PromptScores
from quire.runner.rows import DeviceRows, Int64
from quire.runner.sampler import SampledTokens, Sampler


class DecoderModel(Protocol):
    """What every architecture offers (T 4.3.1)."""

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor: ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    """Rows, model, attention backend and sampler of one device."""

    launches = False

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        rows: DeviceRows,
        sampler: Sampler,
    ) -> None:
        self.model = model
        self.backend = backend
        self.rows = rows
        self.sampler = sampler
        self._moves = Moves(backend)
        self._scores = PromptScores(sampler.vocab_size)

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Carry out one plan. Whatever it raises, the rows' counters have not moved."""
        began = time.perf_counter()
        self._start_and_release(plan)
        self.rows.apply(plan)
        self._moves.carry_out(plan)
        if len(plan.rows) == 0:
            nothing = np.empty((0, 1), np.int32)
            return StepResult(plan.step_id, nothing, nothing[:, 0])
        input_ids_T, step = self.rows.step_inputs(plan)
        self.backend.prepare(step)
        hidden_TD = self.model(input_ids_T, step.positions_T, self.backend)
        prompt_candidates = self._score_prompts(plan, hidden_TD)
        sampled, lengths_N = self._sample(plan, hidden_TD)
        result = self._to_host(plan, sampled, prompt_candidates, began)
        # Last: until here everything can be done again.
        self.rows.advance(plan, sampled.token_ids_N, lengths_N)
        return result

    def launch(self, plan: Plan) -> Pending:
        """Carry out one plan, and have its result ready."""
        return Finished(self.run(plan))

    def idle(self) -> bool:
        return False

    def graph_bytes(self, config: EngineConfig) -> int:
        return 0

    def _start_and_release(self, plan: Plan) -> None:
        self._scores.start_and_release(plan)
        if len(plan.released):
            self.sampler.release_rows(plan.released)
        for start in plan.started:
            self.sampler.start_row(start)
        for fork in plan.forked:
            self.sampler.copy_row(fork.parent, fork.child, fork.sample_index)

    def _sample(self, plan: Plan, hidden_TD: torch.Tensor) -> tuple[SampledTokens, Int64]:
        """Choose a token for each sampling row; also the rows' lengths before it."""
        ends = np.cumsum(plan.num_tokens, dtype=np.int64)
        lengths_S = (plan.computed_bound + plan.num_tokens).astype(np.int64)
        at_N = plan.sample_places
        lengths_N = lengths_S[at_N]
        last_N = torch.from_numpy(ends[at_N] - 1).to(hidden_TD.device)
        logits_NV = self.model.logits(select_rows(hidden_TD, last_N))
        sampled = self.sampler.sample(
            logits_NV,
            plan.sample_rows,
            lengths_N,
            self.rows.tokens_RM,
            lengths_N,
            self.rows.prompt_lens[plan.sample_rows],
        )
        return sampled, lengths_N

    def _score_prompts(self, plan: Plan, hidden_TD: torch.Tensor) -> dict[int, list[Candidates]]:
        """Log-probabilities of the prompt tokens that follow the positions of this step."""
        found: dict[int, list[Candidates]] = {}
        for part in self._scores.of(plan, self.rows.prompt_lens):
            targets = self.rows.tokens_RM[part.row, part.first + 1 : part.last + 1]
            logits = self.model.logits(hidden_TD[part.place : part.place + part.count])
            scored = self.sampler.prompt_logprobs(logits, targets, part.num)
            found.setdefault(part.row, []).extend(scored)
        return found

    def _to_host(
        self,
        plan: Plan,
        sampled: SampledTokens,
        prompt_candidates: dict[int, list[Candidates]],
        began: float,
    ) -> StepResult:
        """The one place where values leave the device."""
        token_ids = sampled.token_ids_N.cpu().numpy().astype(np.int32).reshape(-1, 1)
        return StepResult(
            step_id=plan.step_id,
            token_ids=token_ids,
            num_accepted=np.ones(len(token_ids), np.int32),
            candidates=sampled.candidates,
            prompt_candidates=prompt_candidates,
            row_errors=sampled.row_errors,
            unservable_rows=sampled.unservable_rows,
            duration_s=time.perf_counter() - began,
        )
