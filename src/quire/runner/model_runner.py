"""The runner of a model with torch: the forward pass, and steps recorded as graphs.

`steps.py` defines the order of a step and its attachments. This file holds the parts of a step that
read tensors.

Shape legend: T tokens of the step, N sampling rows, D model dim, V vocabulary.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from quire.base.masks import MaskPromise
from quire.base.plan import Plan
from quire.base.settings.config import EngineConfig
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention_inputs import AttentionStep, Int32
from quire.ops.embedding import select_rows
from quire.ops.rows.step_inputs import StepInputs
from quire.ops.sampling.device_drafts import Runs
from quire.runner.attachment import Step
from quire.runner.gpu.graphs import Graphs, Recorded, measured_bytes
from quire.runner.gpu.used_sizes import UsedSizes
from quire.runner.gpu.verification import drafted_of
from quire.runner.memory_plan import MAX_OTHER_GRAPHS, all_graphs_bytes, has_drafts
from quire.runner.step_ops import Needs, StepShape
from quire.runner.steps import StepRunner


@functools.lru_cache(64)
def _uncut(needs: Needs) -> Needs:
    """Return the needs of a step that cuts no row; the same object for equal needs."""
    return replace(needs, is_uncut=True)


class DecoderModel(Protocol):
    """Interface of every model (T 4.3.1). Positions are [T], or [3, T] with M-RoPE. An id below 0
    stands for an encoder output (runner/media)."""

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor: ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor: ...


class ModelRunner(StepRunner):
    """Rows, model, attention backend and sampler of one device, with tensors."""

    _graphs: Graphs | None = None
    _in_pieces = False  # attention is launched between graphs, and knows each step's lengths
    _ones: Int32 | None = None  # numbers of tokens of the last plan, if each row had one

    @torch.inference_mode()
    def launch(self, plan: Plan, masks: MaskPromise | None = None) -> Step:
        """See StepRunner."""
        return super().launch(plan, masks)

    @torch.inference_mode()
    def note(self, plan: Plan) -> None:
        """See StepRunner."""
        super().note(plan)

    def attention_step(self, inputs: StepInputs, shape: StepShape) -> AttentionStep:
        """See StepRunner."""
        return AttentionStep(
            positions_T=inputs.positions_T,
            query_starts_S1=inputs.query_starts_S1,
            context_lens_S=inputs.context_lens_S,
            slots_T=inputs.slots_T,
            block_tables_SL=inputs.block_tables_SL,
            query_lens_host=shape.query_lens,
            context_lens_host=shape.context_lens,
            is_uncut=shape.is_uncut,
            is_separate=shape.is_separate,
        )

    def logits(self, hidden_TD: torch.Tensor, last_N: torch.Tensor, needs: Needs) -> torch.Tensor:
        """See StepRunner."""
        logits = self.model.logits(select_rows(hidden_TD, last_N))
        return self.sampler.vocabulary.needed(logits, needs)

    # ---- recorded steps --------------------------------------------------------------------------

    @property
    def can_record(self) -> bool:
        """Return whether steps can be recorded as graphs."""
        can_hold = self.backend.can_be_recorded and self.rows.ops.can_be_recorded
        return self.device.can_capture and can_hold

    def record(
        self,
        *,
        in_pieces: bool,
        used: UsedSizes | None = None,
        max_others: int = MAX_OTHER_GRAPHS,
    ) -> None:
        """Record later steps as graphs and replay them, if device and backend support it."""
        if self.can_record:
            num_rows, self._in_pieces = self.rows.max_num_rows, in_pieces
            self._graphs = Graphs(
                self.device, self, num_rows, in_pieces=in_pieces, used=used, max_others=max_others
            )

    @torch.inference_mode()
    def warm_up(self, num_blocks: Sequence[int], drafters: Sequence[Runs | None]) -> None:
        """Record steps that cover all others, and compile what they and moves launch. Nothing may
        be stored yet. num_blocks: of each cache group. drafters: searches of the device's drafter,
        None for the host's."""
        if self._graphs is None:
            return
        self._graphs.warm_up(*drafters)
        self.rows.ops.fork(np.zeros((1, 2), np.int32))  # a row to itself
        first, second = np.arange(2, dtype=np.int32)[:, None]
        for group, num in enumerate(num_blocks):
            for destination in (first, second)[:num]:
                self.backend.copy_blocks(group, first, destination)
        self.device.run(list).wait()

    @torch.inference_mode()
    def idle(self) -> bool:
        """Record one more expected step, if any; return whether a step was recorded."""
        return self._graphs is not None and self._graphs.record_next()

    def find_recorded(self, plan: Plan, needs: Needs, runs: Runs | None = None) -> Recorded | None:
        """See StepRunner."""
        if self._graphs is None:
            return None
        num_row_slots = max(len(plan.rows), len(plan.sample_rows))
        is_decoding = self._has_one_each(plan) and self._are_separate(plan)
        num_tokens = 0 if is_decoding else plan.num_scheduled_tokens
        is_whole = is_decoding and not self._in_pieces
        if is_whole and self.backend.prefers_uncut(plan.computed_bound + 1):
            needs = _uncut(needs)
        return self._graphs.find(num_row_slots, num_tokens, needs, drafted_of(plan, runs))

    def _has_one_each(self, plan: Plan) -> bool:
        """Return whether each row has one token. A repeated plan has the same array of numbers."""
        if plan.num_tokens is not self._ones:
            is_one_each = plan.num_scheduled_tokens == len(plan.rows)
            self._ones = plan.num_tokens if is_one_each else None
        return self._ones is not None

    def _are_separate(self, plan: Plan) -> bool:
        """Return whether a decoding graph serves this plan of rows with one token each. A row that
        starts may read blocks that other rows of its first step write."""
        return not ((plan.started or plan.forked) and self.backend.needs_separate)

    def graph_bytes(self, config: EngineConfig) -> int:
        """Return the measured bytes of recorded steps; 0 if steps are not recorded."""
        if config.enforce_eager or not self.can_record:
            return 0
        return all_graphs_bytes(config, measured_bytes(self, has_drafts=has_drafts(config)))
