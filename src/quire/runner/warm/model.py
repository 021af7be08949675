"""Starts without torch: run a model saved by an earlier start, until a request needs torch."""

import importlib
import logging
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.base.masks import MaskPromise
from quire.base.messages import Request
from quire.base.plan import DraftAnswer, DraftOrder, Plan, StepResult
from quire.base.settings.config import EngineConfig
from quire.base.step_progress import StepProgress
from quire.models.checkpoint.source import ModelSource
from quire.ops.host.pages import forget
from quire.ops.host.threads import num_threads
from quire.ops.host.torch_import import import_torch
from quire.runner.derive import derive_config, with_length
from quire.runner.memory_plan import (
    MemoryPlan,
    available_cpu_bytes,
    host_tier_limits,
    plan_cpu_memory,
)
from quire.runner.steps import StepRunner
from quire.runner.warm.array_ops import empty_arrays
from quire.runner.warm.blocks import WarmBlocks
from quire.runner.warm.conditions import (
    can_save_start,
    is_plain,
    is_plain_request,
    is_plain_row,
    path_for,
)
from quire.runner.warm.start_file import Start, read_start
from quire.runner.warm.warm_runner import WarmRunner, saved_programs
from quire.spec.model_spec import ModelSpec, load_spec
from quire.spec.pooling_spec import with_pooling

if TYPE_CHECKING:
    from quire.runner.setup.built import BuiltRunner

logger = logging.getLogger("quire")

LOAD_S = 300.0  # for torch and the whole runner; on an idle machine it takes about a second


@dataclass
class WarmModel:
    """Loaded model as an engine sees it (`LoadedModel`), which runs plans without torch at first.

        executor's thread   plain  plain  plain  plain | shares the rows | plain  any  plain
        another thread           load: torch, weights  |

    A first start has loaded the whole runner, and shares the rows from its first plan on
    (`first_start.py`). In later starts the first request that is not plain loads torch and the
    whole runner, over the same memory.
    `load` builds it on a separate thread. The requests that need it wait (the engine's
    `Preparation`), and plain plans continue. The first plan that is not plain shares the rows with
    the whole runner. If it arrives before any request announced it, it loads within its step.
    Plain plans still run without torch, which takes less time on the host. Both runners note the
    rows that each plan starts, forks and releases. After `take_over` the whole runner runs all.

    given_config: the settings as they were given. dtype: by name.
    """

    given_config: EngineConfig
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
    drafter_reads_target: bool | None = None
    progress: StepProgress = field(default_factory=StepProgress)
    _loading: threading.Lock = field(default_factory=threading.Lock)
    _loaded: "BuiltRunner | None" = None  # does not own the rows yet
    _whole: "BuiltRunner | None" = None
    _alternates: bool = True  # plain plans do not go to the whole runner
    _special: set[int] = field(default_factory=set)  # rows that are not plain

    @property
    def num_threads(self) -> int:
        """Return the number of threads of a step."""
        return num_threads()

    @property
    def has_torch(self) -> bool:
        """Return whether the whole runner, with torch, runs plans that need it."""
        return self._whole is not None

    def run(self, plan: Plan, masks: MaskPromise | None = None) -> StepResult:
        """Run a plan and wait for its result."""
        if self._whole is None and not is_plain(plan):
            self.load()
            self._share_rows()
        if self._whole is None:
            return self.runner.run(plan)
        if self._alternates:
            if self._is_plain(plan):
                _note(plan, self._whole.runner)
                return self.runner.run(plan)
            _note(plan, self.runner)
        return self._whole.run(plan, masks)

    def _is_plain(self, plan: Plan) -> bool:
        """Return whether a plan has plain rows only, also among rows that earlier plans started."""
        special = self._special
        if plan.started or plan.forked or len(plan.released):
            self._note_special(plan)
        return is_plain(plan) and (not special or special.isdisjoint(plan.rows.tolist()))

    def _note_special(self, plan: Plan) -> None:
        """Note which rows are not plain from this plan on."""
        special = self._special
        special.difference_update(plan.released.tolist())
        for start in plan.started:
            special.discard(start.row)
            if not is_plain_row(start):
                special.add(start.row)
        for fork in plan.forked:
            special.discard(fork.child)
            if fork.parent in special:
                special.add(fork.child)

    def needs_whole(self, request: Request) -> bool:
        """Return whether a request must wait for `load`."""
        return self._loaded is None and not is_plain_request(request)

    def load(self) -> None:
        """Import torch and build the whole runner, or wait for a thread that does. Rows stay
        untouched."""
        with self._loading:
            if self._loaded is None:
                self.progress.report(LOAD_S)
                try:
                    self._loaded = self._build()
                finally:
                    self.progress.report()

    def skip(self, plan: Plan) -> None:
        """Note a plan that is not carried out because an earlier plan failed."""

    def run_draft(self, order: DraftOrder) -> DraftAnswer:
        """Raise NotImplementedError: this model has no drafter."""
        raise NotImplementedError("a model that started without torch has no drafter")

    def _build(self) -> "BuiltRunner":
        """Build the runner with torch, over the memory of this one."""
        logger.info("torch is imported, because a request needs it")
        # Steps continue meanwhile, and their first `np.unique` imports this. Such a step could wait
        # for Python's import lock, which the import of torch holds for long.
        importlib.import_module("numpy.ma")
        import_torch()
        from quire.runner.build import WarmMemory, build_runner

        warm_memory = WarmMemory(
            self.memory, tuple(self.runner.backend.data), self.runner.rows.state
        )
        return build_runner(self.given_config, self.source, warm_memory=warm_memory)

    def load_whole(self) -> "BuiltRunner":
        """Load as `load` does, and return the whole runner, which may not own the rows yet."""
        self.load()
        assert self._loaded is not None
        return self._loaded

    @property
    def whole(self) -> "BuiltRunner | None":
        """Return the whole runner if it owns the rows."""
        return self._whole

    def free_pages(self, *, weights: bool) -> None:
        """Return the memory of KV blocks to the system; their contents are lost. weights: also the
        pages of the saved start, which later steps read from its file again."""
        pieces = [*self.runner.backend.data, *(self.runner.mapped if weights else ())]
        for piece in pieces:
            forget(piece.ctypes.data, piece.nbytes)

    def take_over(self) -> None:
        """Hand the rows over to the whole runner for good, between two steps, if it has been
        loaded, because its weights change."""
        if self._loaded is not None:
            self._share_rows()
            self._alternates = False
            self.runner.drop_programs()

    def share_rows_with(self, built: "BuiltRunner") -> None:
        """Let a whole runner over the same memory run the plans that are not plain."""
        self._loaded = built
        self._share_rows()

    def _share_rows(self) -> None:
        """Share the rows with the loaded runner. All of them are plain. A second call does
        nothing."""
        built = self._loaded
        if built is None or self._whole is not None:
            return
        built.runner.sampler.flags = self.runner.sampler.flags
        built.runner.rows.prompt_lens = self.runner.rows.prompt_lens
        built.runner.rows.forks = self.runner.rows.forks
        self._whole = built


def _note(plan: Plan, other: StepRunner) -> None:
    """Let a runner note the rows of a plan that the other one carries out, if any change."""
    if plan.started or plan.forked or len(plan.released) or other.attachments:
        other.note(plan)


def start_warm(config: EngineConfig, source: ModelSource) -> WarmModel | None:
    """Start a model without torch from the saved start; None if there is none. Raises ConfigError
    and OutOfMemory as a start with torch does."""
    path = path_for(config, source)
    start = None if path is None else read_start(path)
    if start is None:
        return None
    spec = with_pooling(load_spec(source.directory), source.directory, config.model)
    if not can_save_start(spec):
        return None
    return _made(config, source, spec, start)


def _made(
    given_config: EngineConfig, source: ModelSource, spec: ModelSpec, start: Start
) -> WarmModel | None:
    config = derive_config(given_config, spec, "cpu")
    spec = spec.served_up_to(config.model.max_model_len)
    free = available_cpu_bytes()
    memory = plan_cpu_memory(config, spec, start.weights_bytes, free)
    config = with_length(config, memory.max_model_len)
    if host_tier_limits(config, spec, memory, free) is not None:
        return None
    cache, scheduler, groups = config.cache, config.scheduler, spec.cache_groups
    num_rows, length = scheduler.max_num_seqs, config.model.row_capacity
    assert num_rows and length
    rows = empty_arrays(num_rows, length, len(groups), cache.block_size)
    blocks = WarmBlocks(
        groups, memory.num_blocks, cache.block_size, config.model.dtype, cache.kv_cache_dtype
    )
    runner = WarmRunner(saved_programs(start, blocks), rows, blocks)
    dtype = f"torch.{config.model.dtype}"
    return WarmModel(
        given_config, source, runner, config, spec, memory, dtype, start.copy_bytes_per_s
    )
