"""From a configuration to an engine: everything between a model's name and a client."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.base.clock import Clock, MonotonicClock
from quire.base.config import EngineConfig, flat_settings
from quire.base.draft_order import DraftAnswer, DraftOrder
from quire.base.errors import ConfigError
from quire.base.model_spec import ModelSpec
from quire.base.speculation import DRAFT_MODEL, Speculation, parse_speculation, speculation_of
from quire.base.validation import RequestLimits
from quire.engine.client import InProcessClient
from quire.engine.connectors.connect import connect_stores
from quire.engine.core import EngineCore
from quire.engine.drafting import Drafting
from quire.engine.executor import Executor, InProcessExecutor
from quire.engine.grammars import Grammars
from quire.engine.identity import fingerprint_of
from quire.engine.launching import LaunchingExecutor
from quire.engine.model_drafting import DrafterTraits, ModelDrafting
from quire.engine.prefix_file import pin_configured
from quire.engine.record import Recorder
from quire.engine.requests import RequestMaker
from quire.engine.step_budget import StepBudget
from quire.engine.text import build_text_side, check_same_tokens, read_vocabulary
from quire.engine.threaded import DeviceThread, ThreadedExecutor
from quire.kv.manager import KVManager
from quire.kv.sizing import MemoryPlan
from quire.models.source import ModelSource, resolve_model
from quire.ops.threads import num_threads
from quire.render.renderer import Renderer
from quire.runner.build import BuiltRunner, Progress, build_runner, choose_device
from quire.runner.derive import depth_of
from quire.runner.memory_plan import block_bytes_of
from quire.runner.step_size import first_budget
from quire.scheduler.memory import Memory
from quire.scheduler.policies import POLICIES, make_policy
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger("quire")

MOST_MASK_THREADS = 8  # beside a GPU
Draft = Callable[[DraftOrder], DraftAnswer]
STORE_SETTINGS = ("kv_disk_dir", "kv_store")  # where blocks are kept


@dataclass(frozen=True)
class Engine:
    """An in-process engine with its text side. config: with all derived values filled in."""

    client: InProcessClient
    renderer: Renderer
    requests: RequestMaker
    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan


@dataclass(frozen=True)
class BuiltCore:
    """A core with its model loaded. config: with all derived values filled in."""

    core: EngineCore
    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan


def build_engine(
    config: EngineConfig, progress: Progress | None = None, clock: Clock | None = None
) -> Engine:
    """Resolve, load, plan memory, connect. Raises ModelError, ConfigError, OutOfMemory."""
    clock = clock or MonotonicClock()
    source = resolve_model(config.model.model, config.model.revision)
    text = build_text_side(config.model, source)
    built = build_core(config, source, clock, progress)
    pin_configured(built.core, config.cache, text)
    client = InProcessClient(built.core, text.tokenizer, clock)
    return Engine(client, text.renderer, text.requests, built.config, built.spec, built.memory)


def build_core(
    config: EngineConfig, source: ModelSource, clock: Clock, progress: Progress | None = None
) -> BuiltCore:
    """Load the model, plan memory, connect scheduler and executor. With more than one plan in
    flight the model is loaded, and does all its work, on a thread of its own."""
    _check_record(config)
    _check_drafter(config, source)
    is_asked_for = config.scheduler.max_num_batched_tokens is not None
    built, executor, draft = _build_executor(config, source, progress)
    config = built.config
    if not config.disable_log_stats:
        _log_start(built, source)
    core = EngineCore(
        make_scheduler(built, source),
        executor,
        clock,
        RequestLimits(
            built.spec.vocab_size,
            config.model.max_model_len or 0,
            config.max_logprobs,
            config.scheduler.max_num_seqs or 0,
            config.logits_processors,
        ),
        None if is_asked_for else _step_budget(built),
    )
    connect_stores(core, built)
    grammars = _make_grammars(core, built, source)
    core.constrain(grammars)
    speculation = speculation_of(config.speculative_config, config.scheduler.pipeline_depth)
    if speculation is not None:
        core.draft(_make_drafting(core, built, speculation, grammars, draft))
    core.max_num_queued = config.scheduler.max_num_queued_reqs
    if config.record is not None:
        settings = flat_settings(config) | {"kv_cache_memory_bytes": built.memory.pool_bytes}
        settings |= dict.fromkeys(STORE_SETTINGS)  # a replay asks no store, and it may be a secret
        path, max_bytes = Path(config.record), config.record_max_mb * 1_000_000
        core.record(
            Recorder(core.scheduler, path, max_bytes, config.record_tokens, settings, clock.now())
        )
    return BuiltCore(core, config, built.spec, built.memory)


def _make_drafting(
    core: EngineCore,
    built: BuiltRunner,
    speculation: Speculation,
    grammars: Grammars,
    draft: Draft,
) -> Drafting | ModelDrafting:
    """Make what guesses. draft: carries out what a model is to guess."""
    drafter = built.spec.drafter
    if built.draft is None or drafter is None:
        return Drafting(speculation, grammars, built.config.scheduler.max_num_seqs or 0)
    traits = DrafterTraits(
        speculation.num_tokens,
        built.config.scheduler.max_num_batched_tokens or 0,
        drafter.max_position,
        built.config.cache.block_size,
        reads=built.draft.is_ahead,
        may_lag=not built.draft.is_ahead and all(g.keeps_all for g in drafter.own_groups),
    )
    return ModelDrafting(traits, grammars, draft, core.scheduler.drafts.holders)


def _step_budget(built: BuiltRunner) -> StepBudget | None:
    """Make what follows the time of steps, on a CPU; a GPU's are short."""
    if built.device.type != "cpu" or built.runner.is_async:
        return None
    return StepBudget(first_budget(built.config, built.spec, num_threads()))


def _make_grammars(core: EngineCore, built: BuiltRunner, source: ModelSource) -> Grammars:
    """Make what follows grammars. On a CPU the step needs the cores; it has the time."""
    model, vocab_size, num_cores = built.config.model, built.spec.vocab_size, num_threads()
    num = num_cores // 4 if built.device.type == "cpu" else min(num_cores // 2, MOST_MASK_THREADS)
    return Grammars(
        lambda: read_vocabulary(model, source, vocab_size), vocab_size, max(1, num), core.bell.ring
    )


def _build_executor(
    config: EngineConfig, source: ModelSource, progress: Progress | None
) -> tuple[BuiltRunner, Executor, Draft]:
    """Build the runner, what carries out its plans, and what carries out a drafter's orders, in the
    same thread."""
    device = choose_device(config.device).type
    if device == "cpu" and depth_of(config, device) == 1:
        built = build_runner(config, source, progress)
        if not built.runner.is_async:
            return built, InProcessExecutor(built), built.guess
        thread = DeviceThread()  # Triton's interpreter in a GPU's place
    else:
        thread = DeviceThread()
        built = thread.call(lambda: build_runner(config, source, progress))

    def draft(order: DraftOrder) -> DraftAnswer:
        return thread.call(lambda: built.guess(order))

    if built.runner.is_async:
        return built, LaunchingExecutor(built, thread), draft
    return built, ThreadedExecutor(InProcessExecutor(built), thread), draft


def _check_record(config: EngineConfig) -> None:
    """Raise ConfigError for an engine that cannot be recorded, but shall be."""
    policy = config.scheduler.scheduling_policy
    if config.record is not None and policy not in POLICIES:
        raise ConfigError(
            f"record={config.record!r} cannot keep the scheduling policy {policy!r}, which another"
            f" package brings; leave record out, or take one of {', '.join(POLICIES)}."
        )


def _check_drafter(config: EngineConfig, source: ModelSource) -> None:
    """Raise ConfigError for a model that guesses other tokens, before anything is loaded."""
    speculation = parse_speculation(config.speculative_config)
    if speculation is not None and speculation.method == DRAFT_MODEL and speculation.model:
        check_same_tokens(config.model, source, resolve_model(speculation.model))


def make_scheduler(built: BuiltRunner, source: ModelSource) -> Scheduler:
    """Make the scheduler of a runner, over pools of the size that its memory plan found."""
    config = built.config
    kv = KVManager(
        built.spec.cache_groups,
        built.memory.num_blocks,
        config.cache.block_size,
        config.cache.enable_prefix_caching,
        block_bytes=block_bytes_of(config, built.spec),
        host_limits=built.host_limits,
    )
    most_tokens = config.scheduler.max_num_batched_tokens or 0
    memory = Memory(kv, most_tokens, config.cache.watermark, fingerprint_of(built, source))
    return Scheduler(
        memory,
        config.scheduler,
        config.model.max_model_len or 0,
        make_policy(config.scheduler.scheduling_policy),
        num_stores=len(config.cache.stores) if built.host_limits else 0,
    )


def _log_start(built: BuiltRunner, source: ModelSource) -> None:
    logger.info(
        "model %s (%s, %s) on %s, attention: %s",
        source.name, built.spec.model_type, str(built.dtype).removeprefix("torch."),
        built.device, built.backend_name,
    )  # fmt: skip
    if built.draft_source is not None and built.spec.drafter is not None:
        drafter = built.spec.drafter
        logger.info("guesses: %s (%s)", built.draft_source.name, drafter.model_type)
    logger.info("%s", built.memory.describe())
