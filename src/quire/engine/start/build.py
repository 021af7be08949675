"""Build an in-process engine, or a server's core, from a configuration."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire.base.clock import Clock, MonotonicClock
from quire.base.errors import ConfigError
from quire.base.plan import DraftAnswer, DraftOrder
from quire.base.plugins import short_name
from quire.base.requests.numerics import fingerprint
from quire.base.requests.validation import RequestLimits
from quire.base.settings.cache_config import SERVE, CacheConfig
from quire.base.settings.config import EngineConfig, public_settings
from quire.base.settings.lora import LoraConfig
from quire.base.settings.secrets import SecretUrl
from quire.base.settings.speculation import (
    DRAFT_MODEL,
    FORCED,
    NGRAM,
    Speculation,
    parse_speculation,
    speculation_of,
)
from quire.base.step_progress import StepProgress
from quire.engine.attachments.adapters import AdapterAttachment, LoadAdapter, NoAdapters
from quire.engine.attachments.drafting import DraftingAttachment
from quire.engine.attachments.grammars import GrammarAttachment
from quire.engine.attachments.kv_events import publish_events
from quire.engine.attachments.loading import Loading
from quire.engine.attachments.on_demand import OnDemand
from quire.engine.attachments.pausing import Pausing, Sleeping
from quire.engine.attachments.queue_limit import QueueLimit
from quire.engine.attachments.recorder import Recorder, check_recordable, make_directory
from quire.engine.attachments.retained_files import RetainedFiles, save_retained
from quire.engine.attachments.stores import StoresAttachment
from quire.engine.attachments.weight_updates import WeightUpdates
from quire.engine.client.client import InProcessClient
from quire.engine.client.request_maker import RequestMaker
from quire.engine.connectors.connections import OpenStores, Worker
from quire.engine.connectors.direct import DirectSource
from quire.engine.connectors.host_index import HostIndex
from quire.engine.connectors.identity import fingerprint_of
from quire.engine.connectors.make import TakeAnswer, open_stores, split_via
from quire.engine.connectors.served import ServedBlocks
from quire.engine.drafting.device_drafting import DeviceDrafting
from quire.engine.drafting.drafting import Drafting
from quire.engine.drafting.model_drafting import DrafterTraits, ModelDrafting
from quire.engine.drafting.plugin_drafter import PluginDrafters
from quire.engine.executors.executor import Executor, InProcessExecutor
from quire.engine.executors.loaded import LoadedModel
from quire.engine.grammars.grammars import Grammars
from quire.engine.grammars.vocabulary import Vocabulary
from quire.engine.loop.attachment import Attachment
from quire.engine.loop.core import EngineCore
from quire.engine.observability.adapter_use import AdapterUse
from quire.engine.observability.rank_times import RankTimes
from quire.engine.start.model_memory import ModelMemory
from quire.engine.start.numerics import numerics_of
from quire.engine.start.plugin_parts import check_plugins
from quire.engine.start.prefix_file import pin_configured, read_entries
from quire.engine.start.preflight import check_before_loading
from quire.engine.start.text import build_text_side, check_same_tokens, read_vocabulary
from quire.kv.manager import KVManager
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.source import (
    ModelSource,
    load_format_of,
    resolve_model,
    resolve_source,
)
from quire.ops.host.native import chain_of
from quire.ops.host.threads import num_threads
from quire.ops.host.torch_import import import_torch
from quire.render.renderer import Renderer
from quire.runner.memory_plan import MemoryPlan, block_bytes_of
from quire.runner.setup.step_size import StepBudget, first_budget
from quire.runner.warm.model import WarmModel, start_warm
from quire.scheduler.core.memory import Memory
from quire.scheduler.core.names import Digester
from quire.scheduler.policy.policies import make_block_hash, make_eviction, make_policy
from quire.scheduler.scheduler import Scheduler
from quire.spec.gguf.container import GGUFFile, is_gguf
from quire.spec.media_families import whole_fields
from quire.spec.model_spec import ModelSpec, read_config

if TYPE_CHECKING:
    from quire.engine.ranks.launch import Ranks
    from quire.ops.blocks.host_blocks import HostBlocks


def connect_stores(core: EngineCore, cache: CacheConfig, side: "DeviceSide", clock: Clock) -> None:
    """Open the configured stores, or connect to the stores of the ranks, and attach them to the
    core. Raises ConfigError if a store cannot be opened, prefix caching is off, or the
    attention backend does not share its blocks."""
    settings = cache.stores
    if not settings:
        return
    if core.scheduler.stores is None:
        raise ConfigError(
            f"{SecretUrl(settings[0])!r} has no effect without prefix caching; remove it, or set"
            " enable_prefix_caching."
        )
    if side.connect_stores is not None:
        opened = side.connect_stores(core.bell.ring)
        core.attach(StoresAttachment(opened, clock, settings))
        return
    core_memory, ring = core.scheduler.memory, core.bell.ring

    def serve(setting: str, memory: "HostBlocks", answer: TakeAnswer) -> Worker:
        index = HostIndex(core_memory.names.fingerprint, memory, core_memory.kv.host_pools)
        address, transfer = split_via(setting.removeprefix(SERVE).removeprefix("//"))
        direct = None if transfer is None else DirectSource(transfer, memory)
        return ServedBlocks(address, index, answer, ring, direct)

    fingerprint, name = core_memory.names.fingerprint, side.model.backend_name
    stores = open_stores(cache, fingerprint, side.host_blocks, name, ring, serve)
    core.attach(StoresAttachment(stores, clock, settings))


logger = logging.getLogger("quire")

MAX_MASK_THREADS = 8  # maximum number of mask threads alongside a GPU
Draft = Callable[[DraftOrder], DraftAnswer]
Progress = Callable[[int, int], None]
ConnectRanks = Callable[[Callable[[], None]], OpenStores]  # takes the call that wakes the core
# Settings of an engine without stores.
STORE_SETTINGS = {
    "kv_disk_dir": None,
    "kv_store": (),
    "kv_eager": False,
    "kv_transfer_config": None,
}


@dataclass(frozen=True)
class Engine:
    """In-process engine with its text side. config: configuration with all derived values."""

    client: InProcessClient
    renderer: Renderer
    requests: RequestMaker
    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan


@dataclass(frozen=True)
class DeviceSide:
    """Loaded model with its executor. draft: runs a drafter's order. host_blocks: host memory of
    the blocks, if it is in this process. progress: receiver of reports of progress in a step.
    load_adapter: loads an adapter into a slot; None if the model takes none. connect_stores: see
    `connect_stores`; None if no ranks have opened stores."""

    model: LoadedModel
    executor: Executor
    draft: Draft
    host_blocks: "HostBlocks | None" = None
    rank_times: Sequence[RankTimes] = ()
    progress: StepProgress = field(default_factory=StepProgress)
    load_adapter: LoadAdapter | None = None
    connect_stores: ConnectRanks | None = None


@dataclass(frozen=True)
class BuiltCore:
    """Core with a loaded model. config: configuration with all derived values. grammars: grammars
    of the core's requests. rank_times: live step times of its ranks. progress: receiver of reports
    of progress within a step. updates, pausing, sleeping: orders of a trainer. adapters: use of
    adapters, if requests may use them. numerics: returns what determines the bits of answers."""

    core: EngineCore
    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan
    grammars: Grammars
    updates: WeightUpdates
    pausing: Pausing
    sleeping: Sleeping
    rank_times: Sequence[RankTimes] = ()
    progress: StepProgress = field(default_factory=StepProgress)
    adapters: AdapterUse | None = None
    numerics: Callable[[], dict[str, str]] = dict


def build_engine(
    config: EngineConfig, progress: Progress | None = None, clock: Clock | None = None
) -> Engine:
    """Load the model and connect a client. Raises ModelError, ConfigError or OutOfMemory."""
    num_cores = config.parallel.data_parallel_size
    if num_cores > 1:
        raise ConfigError(
            f"data_parallel_size={num_cores}, but an engine in this process has one core; remove"
            " it, or use quire serve, LLM or AsyncLLM."
        )
    clock = clock or MonotonicClock()
    ranks = start_ranks(config)
    with ended_if_raised(ranks):
        source = resolve_source(config.model)
        text = build_text_side(config.model, source)
        built = build_core(config, source, clock, progress, ranks)
    publish_events(built.core, built.config)
    pin_configured(built.core, config.cache, text)
    client = InProcessClient(built.core, text.tokenizer, clock, built.updates, built.sleeping)
    return Engine(client, text.renderer, text.requests, built.config, built.spec, built.memory)


def build_core(
    config: EngineConfig,
    source: ModelSource,
    clock: Clock,
    progress: Progress | None = None,
    ranks: "Ranks | None" = None,
    server: str = "",
) -> BuiltCore:
    """Load the model, plan memory, and connect scheduler and executor. With more than one plan in
    flight, one device thread loads the model and does all its work.

    ranks: started ranks, if the model is not loaded here; this function ends them if it raises.
    server: identity of the core's server, which separates its retained requests from others'."""
    with ended_if_raised(ranks):
        built = _build_core(config, source, clock, progress, ranks)
        _save_retained(built, server, clock)
        return built


def _save_retained(built: BuiltCore, server: str, clock: Clock) -> None:
    """Save retained requests beyond the core's life, if a directory store has their blocks."""
    folders = [
        name.removeprefix("dir:") for name in built.config.cache.stores if name.startswith("dir:")
    ]
    if folders:
        fingerprint = built.core.scheduler.memory.names.fingerprint
        files = RetainedFiles.open(Path(folders[0]), fingerprint, server, clock)
        if files is not None:
            save_retained(built.core, files)


def _build_core(
    config: EngineConfig,
    source: ModelSource,
    clock: Clock,
    progress: Progress | None,
    ranks: "Ranks | None",
) -> BuiltCore:
    _check_record(config)
    check_before_loading(config, source)
    check_plugins(config)
    if config.cache.pin_prefix is not None:
        read_entries(Path(config.cache.pin_prefix))
    _check_drafter(config, source)
    is_given = config.scheduler.max_num_batched_tokens is not None
    side = _load(config, source, progress, ranks)
    built, executor = side.model, side.executor
    config = built.config
    if not config.disable_log_stats:
        _log_start(built, source)
    core = EngineCore(
        make_scheduler(built, source),
        executor,
        clock,
        _limits(built, takes_functions=ranks is None),
        None if is_given else _step_budget(built),
    )
    if (limit := config.scheduler.max_num_queued_reqs) is not None:
        core.attach(QueueLimit(core.scheduler, limit))
    connect_stores(core, config.cache, side, clock)
    adapters = None
    if config.lora.enable_lora:
        adapters = AdapterUse(config.lora.max_loras, core.scheduler.requests)
    core.attach(_adapters(core, config.lora, side.load_adapter, adapters))
    if isinstance(built, WarmModel):
        core.attach(Loading(built.needs_whole, built.load, core.bell.ring))
    grammars = _make_grammars(core, built, source)
    guiding: list[Attachment] = [GrammarAttachment(grammars)]
    speculation = speculation_of(config.speculative_config, config.scheduler.pipeline_depth)
    if speculation is not None:
        drafter = _make_drafting(core, built, speculation, grammars, side.draft)
        drafting = DraftingAttachment(drafter, core.scheduler, core.limits)
        if speculation.method == FORCED:  # draft tokens come from grammars only
            guiding.append(drafting)
        else:
            core.attach(drafting)
    core.attach(OnDemand(core, ("grammar",), guiding))
    model_memory, fixed = ModelMemory(built, source), numerics_of(built, source)

    def numerics() -> dict[str, str]:
        return fixed | {"weights": model_memory.weights}

    if config.record is not None:
        settings = public_settings(config) | {"kv_cache_memory_bytes": built.memory.pool_bytes}
        settings |= STORE_SETTINGS  # a replay uses no store
        path, max_bytes = Path(config.record), config.record_max_mb * 1_000_000
        name, now = fingerprint(numerics()), clock.now()
        core.attach(
            Recorder(core.scheduler, path, max_bytes, config.record_tokens, settings, now, name)
        )
    pausing = Pausing(core)
    updates = WeightUpdates(
        core, model_memory.stage, model_memory.stage_again, lambda: model_memory.weights
    )
    sleeping = Sleeping(core, pausing, updates, model_memory)
    for attachment in (updates, sleeping, pausing):
        core.attach(attachment)
    return BuiltCore(
        core,
        config,
        built.spec,
        built.memory,
        grammars,
        updates,
        pausing,
        sleeping,
        side.rank_times,
        side.progress,
        adapters,
        numerics,
    )


def _limits(built: LoadedModel, takes_functions: bool) -> RequestLimits:
    """Return the limits of requests. takes_functions: whether they may bring Python functions."""
    config, pooling = built.config, built.spec.pooling
    return RequestLimits(
        built.spec.vocab_size,
        config.model.max_model_len or 0,
        config.max_logprobs,
        config.scheduler.max_num_seqs or 0,
        tuple(map(short_name, config.logits_processors)),
        takes_functions=takes_functions,
        pools=pooling is not None,
        has_text_pairs=pooling is not None and pooling.has_text_pairs,
        takes_grammars=True,
    )


def _adapters(
    core: EngineCore, lora: LoraConfig, load: LoadAdapter | None, use: AdapterUse | None
) -> Attachment:
    """Create the attachment that loads adapters, or refuses requests that need one."""
    if use is None or load is None:
        return NoAdapters()
    requests = core.scheduler.requests
    return AdapterAttachment(load, lora.max_loras, core.bell.ring, requests, use.count)


def _make_drafting(
    core: EngineCore,
    built: LoadedModel,
    speculation: Speculation,
    grammars: Grammars,
    draft: Draft,
) -> Drafting | ModelDrafting:
    """Create the drafter that the settings name. draft: runs the orders of a draft model."""
    drafter, num_rows = built.spec.drafter, built.config.scheduler.max_num_seqs or 0
    if built.drafter_reads_target is None or drafter is None:
        scheduler, is_ngram = core.scheduler, speculation.method == NGRAM
        needs_host = scheduler.depth == 1 or scheduler.has_stages or scheduler.memory.kv.has_states
        if speculation.is_plugin:
            plugin = PluginDrafters(speculation, built.spec.vocab_size)
            return Drafting(speculation, grammars, num_rows, plugin)
        kind = DeviceDrafting if is_ngram and not needs_host else Drafting
        return kind(speculation, grammars, num_rows)
    traits = DrafterTraits(
        speculation.num_tokens,
        built.config.scheduler.max_num_batched_tokens or 0,
        drafter.max_position,
        built.config.cache.block_size,
        reads=built.drafter_reads_target,
        may_lag=not built.drafter_reads_target and all(g.keeps_all for g in drafter.own_groups),
    )
    return ModelDrafting(traits, grammars, draft, core.scheduler.drafts.holders)


def _step_budget(built: LoadedModel) -> StepBudget | None:
    """Create the adaptive token budget of steps, for a CPU only. Steps on a GPU are short, and an
    encoder computes whole prompts without decoding rows."""
    if built.device_type != "cpu" or built.is_async or built.spec.is_encoder:
        return None
    return StepBudget(first_budget(built.config, built.spec, built.num_threads))


def _make_grammars(core: EngineCore, built: LoadedModel, source: ModelSource) -> Grammars:
    """Create the core's grammars. On a CPU they get a quarter of the cores: steps need the cores,
    and are long enough to compute masks in the meantime."""
    model, vocab_size, num_cores = built.config.model, built.spec.vocab_size, num_threads()
    load = built.load if isinstance(built, WarmModel) else None

    def make_vocabulary() -> Vocabulary:
        vocabulary = read_vocabulary(model, source, vocab_size)
        if load is not None:
            load()
        return vocabulary

    num = num_cores // 4 if built.device_type == "cpu" else min(num_cores // 2, MAX_MASK_THREADS)
    return Grammars(make_vocabulary, vocab_size, max(1, num), core.bell.ring)


def _check_record(config: EngineConfig) -> None:
    """Raise ConfigError if recording is set but impossible; create the recording's directory."""
    if config.record is not None:
        check_recordable(config)
        make_directory(Path(config.record))


def _check_drafter(config: EngineConfig, source: ModelSource) -> None:
    """Check a configured draft model or head before loading. Raises ModelError if its files are not
    a model, ConfigError if a draft model's tokens differ."""
    speculation = parse_speculation(config.speculative_config)
    if speculation is None or speculation.model is None:
        return
    drafter = resolve_model(speculation.model)
    read_config(drafter.directory)
    if load_format_of(config, drafter) != "dummy":
        checkpoint_files(drafter.directory)
    if speculation.method == DRAFT_MODEL:
        check_same_tokens(config.model, source, drafter)


def _load(
    config: EngineConfig, source: ModelSource, progress: Progress | None, ranks: "Ranks | None"
) -> DeviceSide:
    """Load the model, by ranks or in this process, and return its device side."""
    if ranks is not None:
        loaded = ranks.load(config, source, progress)
        executor = loaded.executor
        return DeviceSide(
            loaded.model,
            executor,
            executor.draft,
            rank_times=executor.times,
            progress=executor.progress,
            load_adapter=executor.load_adapter,
            connect_stores=executor.connect_stores,
        )
    if (warm := start_warm(config, source)) is not None:
        return DeviceSide(warm, InProcessExecutor(warm), warm.run_draft, progress=warm.progress)
    import_torch()
    from quire.engine.executors.local import build_local  # imports torch, only needed here
    from quire.runner.build import build_runner
    from quire.runner.warm.first_start import without_torch

    depth = config.scheduler.pipeline_depth or 1  # default of a CPU
    local = build_local(
        lambda: build_runner(config, source, progress), config.device, is_threaded=depth > 1
    )
    memory = local.built.runner.backend.host_blocks
    if (plain := without_torch(config, source, local.built)) is not None:
        in_process = InProcessExecutor(plain)
        return DeviceSide(plain, in_process, plain.run_draft, memory, progress=plain.progress)
    load = local.built.load_adapter
    return DeviceSide(local.built, local.executor, local.draft, memory, load_adapter=load)


def start_ranks(config: EngineConfig) -> "Ranks | None":
    """Start the ranks of a model; return None if this process computes it."""
    if not config.parallel.has_rank_processes:
        return None
    from quire.engine.ranks.launch import Ranks  # most engines have no ranks
    from quire.engine.ranks.rank_stores import check_stores

    check_stores(config.cache)
    return Ranks(config)


@contextmanager
def ended_if_raised(ranks: "Ranks | None") -> Iterator[None]:
    """End the ranks if the block raises."""
    try:
        yield
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def make_scheduler(built: LoadedModel, source: ModelSource) -> Scheduler:
    """Create the scheduler of a loaded model, with the pool sizes of its memory plan."""
    config = built.config
    kv = KVManager(
        built.spec.cache_groups,
        built.memory.num_blocks,
        config.cache.block_size,
        config.cache.enable_prefix_caching,
        block_bytes=block_bytes_of(config, built.spec),
        host_limits=built.host_limits,
        make_eviction=make_eviction(config.cache.eviction_policy),
    )
    row_capacity = config.scheduler.max_num_batched_tokens or 0
    fingerprint = fingerprint_of(built, source)
    block_hash = make_block_hash(config.cache.prefix_caching_hash_algo)
    digester = Digester(block_hash, chain_of(block_hash))
    memory = Memory(kv, row_capacity, config.cache.watermark, fingerprint, digester)
    return Scheduler(
        memory,
        config.scheduler,
        config.model.row_capacity,
        make_policy(config.scheduler.scheduling_policy),
        num_stores=len(config.cache.stores) if built.host_limits else 0,
        num_stages=config.parallel.pipeline_parallel_size,
        kept=config.cache.kept,
        takes_media=whole_fields(built.spec.raw) is not None,
    )


def _log_start(built: LoadedModel, source: ModelSource) -> None:
    logger.info(
        "model %s (%s, %s, weights: %s) on %s, attention: %s, context: %s tokens",
        source.name, built.spec.type_name, str(built.dtype).removeprefix("torch."),
        _weights_in_words(built, source), built.device_type, built.backend_name,
        f"{built.memory.max_model_len:,}",
    )  # fmt: skip
    if built.draft_source is not None and built.spec.drafter is not None:
        drafter = built.spec.drafter
        logger.info("draft model: %s (%s)", built.draft_source.name, drafter.model_type)
    logger.info("%s", built.memory.describe())


def _weights_in_words(built: LoadedModel, source: ModelSource) -> str:
    """Return how weights are quantised: as requested, as a checkpoint stores them, or not at
    all."""
    requested = built.config.model.quantization
    if requested is not None:
        return "not quantized" if requested == "none" else requested
    if is_gguf(source.directory):
        return GGUFFile(source.directory).describe()
    stored = built.spec.quantization
    return "not quantized" if stored is None else stored.method
