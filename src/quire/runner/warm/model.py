"""A model that started without torch, until somebody asks for what needs it."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.base.config import EngineConfig
from quire.base.draft_order import DraftAnswer, DraftOrder
from quire.base.masks import MaskPromise
from quire.base.model_spec import ModelSpec
from quire.base.plan import Plan, StepResult
from quire.kv.sizing import MemoryPlan
from quire.models.source import ModelSource
from quire.ops.threads import num_threads
from quire.ops.torch_import import import_torch
from quire.runner.warm.rows import is_plain
from quire.runner.warm.warm_runner import WarmRunner

if TYPE_CHECKING:
    from quire.runner.build import BuiltRunner

logger = logging.getLogger("quire")


@dataclass
class WarmModel:
    """Has what an engine knows of a loaded model (`LoadedModel`), and runs plans. The first that is
    not plain brings torch and the whole runner, over the same memory: about a second, once.

    asked: the settings as they were given. dtype: its text is a name.
    """

    asked: EngineConfig
    source: ModelSource
    runner: WarmRunner
    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan
    dtype: str
    copy_bytes_per_s: float
    device_type: str = "cpu"
    backend_name: str = "cpu"
    host_limits: tuple[int, ...] | None = None
    kv_scales: dict[int, tuple[float, float]] = field(default_factory=dict)
    draft_source: ModelSource | None = None
    is_async: bool = False
    drafts_ahead: bool | None = None
    _whole: "BuiltRunner | None" = None

    @property
    def num_threads(self) -> int:
        """Threads of a step."""
        return num_threads()

    @property
    def has_torch(self) -> bool:
        """Tell whether a plan has brought torch and the whole runner."""
        return self._whole is not None

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        """Carry out a plan and wait for it."""
        if self._whole is None:
            if is_plain(plan):
                return self.runner.run(plan)
            self._whole = self._build()
        return self._whole.run(plan, masks)

    def skip(self, plan: Plan) -> None:
        """Take note of a plan that is not carried out, because one before it failed."""

    def guess(self, order: DraftOrder) -> DraftAnswer:
        """Nobody guesses here."""
        raise NotImplementedError("a model that started without torch has no drafter")

    def _build(self) -> "BuiltRunner":
        """Build the runner of a start with torch, and give it the rows as they are."""
        logger.info("torch is imported, for what a request asks for")
        import_torch()
        from quire.runner.build import Taken, build_runner

        rows, blocks = self.runner.rows, self.runner.blocks
        taken = Taken(self.memory, tuple(blocks.data), rows.arrays)
        built = build_runner(self.asked, self.source, taken=taken)
        for row, start in rows.started.items():
            built.runner.sampler.start_row(start)
            built.runner.rows.prompt_lens[row] = rows.column("num_prompt_tokens")[row]
        return built
