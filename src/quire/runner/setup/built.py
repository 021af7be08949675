"""A runner with its inputs: all that an engine holds of a loaded model in its process."""

from dataclasses import dataclass, field

import torch

from quire.base.masks import MaskPromise
from quire.base.plan import DraftAnswer, DraftOrder, Plan, StepResult
from quire.base.settings.config import EngineConfig
from quire.models.checkpoint.kv_scales import Scales
from quire.models.checkpoint.source import ModelSource
from quire.ops.host.threads import num_threads
from quire.runner.adapters import RowAdapters
from quire.runner.drafting.drafting import DraftPasses
from quire.runner.memory_plan import MemoryPlan
from quire.runner.model_runner import ModelRunner
from quire.runner.native_model import expert_pairs_of
from quire.runner.stage import StageModel, run_stage, skip_stage
from quire.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class BuiltRunner:
    """Runner and the objects it was made from. config: with all derived values filled in."""

    runner: ModelRunner
    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan
    dtype: torch.dtype
    device: torch.device
    backend_name: str
    copy_bytes_per_s: float = 0.0
    host_limits: tuple[int, ...] | None = None  # blocks of the host tier, by cache group
    draft: DraftPasses | None = None  # of a draft model
    draft_source: ModelSource | None = None
    kv_scales: Scales = field(default_factory=dict)  # of keys and values in fp8, by layer
    stage: StageModel | None = None  # of a model in stages

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        """Run a plan and wait for its result."""
        if self.stage is None:
            return self.runner.run(plan, masks)
        return run_stage(self.runner, self.stage, plan, masks)

    def skip(self, plan: Plan) -> None:
        """Note a plan that is not carried out because an earlier plan failed."""
        if self.stage is not None:
            skip_stage(self.stage, plan)

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def is_async(self) -> bool:
        """Return whether the device works concurrently with the host."""
        return self.runner.is_async

    @property
    def drafter_reads_target(self) -> bool | None:
        """Return whether the draft model reads the served model's states; None without drafter."""
        return None if self.draft is None else self.draft.reads_target

    @property
    def num_threads(self) -> int:
        """Return the number of threads of a step on a CPU."""
        return num_threads()

    @property
    def expert_pairs(self) -> int:
        """See expert_pairs_of."""
        if self.stage is not None:
            return self.stage.expert_pairs
        return expert_pairs_of(self.runner.model)

    def load_adapter(self, slot: int, adapter_id: str, path: str) -> None:
        """Load an adapter into a slot; see RowAdapters."""
        [adapters] = [each for each in self.runner.attachments if isinstance(each, RowAdapters)]
        adapters.load(slot, adapter_id, path)

    def run_draft(self, order: DraftOrder) -> DraftAnswer:
        """Run an order of the draft model, which must exist, and return its draft tokens."""
        assert self.draft is not None, "no drafter is set"
        return self.draft.run(order)
