"""The runner of a model with torch: its forward pass, and the steps that are recorded as graphs.

`steps.py` has the order of a step, and what attaches to it. Here are the parts of it that read
tensors.

Shape legend: T tokens of the step, N sampling rows, D model dim, V vocabulary.
"""

from typing import Protocol

import torch

from quire.base.masks import MaskPromise
from quire.base.plan import Plan
from quire.base.settings.config import EngineConfig
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention_inputs import AttentionStep
from quire.ops.embedding import select_rows
from quire.ops.rows.step_inputs import StepInputs
from quire.runner.attachment import Step
from quire.runner.gpu.graphs import Graphs, Recorded, UsedSizes, measured_bytes
from quire.runner.step_ops import Needs, StepShape
from quire.runner.steps import StepRunner


class DecoderModel(Protocol):
    """What every architecture offers (T 4.3.1). Of a model with three positions for each token
    positions are [3, T]; an id below 0 stands for an encoder output (runner/media)."""

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor: ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor: ...


class ModelRunner(StepRunner):
    """Rows, model, attention backend and sampler of one device, with tensors."""

    _graphs: Graphs | None = None

    @torch.inference_mode()
    def launch(self, plan: Plan, masks: MaskPromise | None = None) -> Step:
        """See StepRunner."""
        return super().launch(plan, masks)

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

    def record(self, *, in_pieces: bool, used: UsedSizes | None = None) -> None:
        """Record steps from now on, and replay them, where that is possible."""
        if self.can_record:
            num_rows = self.rows.max_num_rows
            self._graphs = Graphs(self.device, self, num_rows, in_pieces=in_pieces, used=used)

    @torch.inference_mode()
    def idle(self) -> bool:
        """Record a step that may come; whether there was something left to do."""
        return self._graphs is not None and self._graphs.record_next()

    def find_recorded(self, plan: Plan, needs: Needs) -> Recorded | None:
        """See StepRunner."""
        if self._graphs is None:
            return None
        num_rows, num_tokens = len(plan.rows), plan.num_scheduled_tokens
        num_places = max(num_rows, len(plan.sample_rows))
        return self._graphs.find(num_places, 0 if num_tokens == num_rows else num_tokens, needs)

    def graph_bytes(self, config: EngineConfig) -> int:
        """Measure what recorded steps take; 0 where none are recorded."""
        return 0 if config.enforce_eager or not self.can_record else measured_bytes(self)
