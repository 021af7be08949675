"""From a configuration to an engine: everything between a model's name and a client."""

import logging
from dataclasses import dataclass
from pathlib import Path

from quire.base.clock import Clock, MonotonicClock
from quire.base.config import EngineConfig
from quire.base.model_spec import ModelSpec
from quire.base.validation import RequestLimits
from quire.engine.client import InProcessClient, RequestMaker
from quire.engine.core import EngineCore
from quire.engine.executor import InProcessExecutor
from quire.kv.digest import cache_fingerprint
from quire.kv.manager import KVManager
from quire.kv.sizing import MemoryPlan
from quire.models.source import ModelSource, resolve_model
from quire.render.generation import read_generation_defaults
from quire.render.renderer import Renderer
from quire.render.tokenizer import Tokenizer
from quire.render.tokenizer_files import has_tokenizer
from quire.runner.build import BuiltRunner, Progress, build_runner
from quire.scheduler.scheduler import Scheduler

logger = logging.getLogger("quire")


@dataclass(frozen=True)
class Engine:
    """An in-process engine with its text side. config: with all derived values filled in."""

    client: InProcessClient
    renderer: Renderer
    requests: RequestMaker
    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan


def build_engine(
    config: EngineConfig, progress: Progress | None = None, clock: Clock | None = None
) -> Engine:
    """Resolve, load, plan memory, connect. Raises ModelError, ConfigError, OutOfMemory."""
    clock = clock or MonotonicClock()
    source = resolve_model(config.model.model, config.model.revision)
    renderer, tokenizer = _text_side(config, source)
    built = build_runner(config, source, progress)
    config = built.config
    if not config.disable_log_stats:
        _log_start(built, source)
    core = EngineCore(
        make_scheduler(built, source.name),
        InProcessExecutor(built),
        clock,
        RequestLimits(built.spec.vocab_size, config.model.max_model_len or 0, config.max_logprobs),
    )
    eos = None if tokenizer is None else tokenizer.eos_token_id
    use_sampling = config.model.generation_config == "auto"
    defaults = read_generation_defaults(source.directory, eos, use_sampling)
    maker = RequestMaker(tokenizer, defaults, config.model.seed)
    client = InProcessClient(core, tokenizer, clock)
    return Engine(client, renderer, maker, config, built.spec, built.memory)


def make_scheduler(built: BuiltRunner, name: str) -> Scheduler:
    """The scheduler of a runner, over pools of the size that its memory plan found."""
    config = built.config
    fingerprint = cache_fingerprint(
        name, config.model.revision or "", str(built.dtype), built.backend_name,
        str(config.cache.block_size), repr(built.spec),
    )  # fmt: skip
    kv = KVManager(
        built.spec.cache_groups,
        built.memory.num_blocks,
        config.cache.block_size,
        config.cache.enable_prefix_caching,
    )
    return Scheduler(
        kv,
        config.scheduler,
        config.model.max_model_len or 0,
        config.cache.watermark,
        fingerprint,
    )


def _text_side(config: EngineConfig, source: ModelSource) -> tuple[Renderer, Tokenizer | None]:
    directory: Path = source.directory
    if config.model.tokenizer is not None:
        directory = resolve_model(config.model.tokenizer, None).directory
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer(directory) else None
    return Renderer(tokenizer, config.model.chat_template), tokenizer


def _log_start(built: BuiltRunner, source: ModelSource) -> None:
    logger.info(
        "model %s (%s, %s) on %s, attention: %s",
        source.name, built.spec.model_type, str(built.dtype).removeprefix("torch."),
        built.device, built.backend_name,
    )  # fmt: skip
    logger.info("%s", built.memory.describe())
