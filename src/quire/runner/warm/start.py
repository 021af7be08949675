"""Starting without torch, with what an earlier start has left."""

from quire.base.config import EngineConfig
from quire.base.model_spec import ModelSpec, load_spec
from quire.base.pooling_spec import with_pooling
from quire.models.source import ModelSource
from quire.runner.derive import derive_config, with_length
from quire.runner.memory_plan import available_cpu_bytes, host_tier_limits, plan_cpu_memory
from quire.runner.warm.array_ops import empty_arrays
from quire.runner.warm.blocks import WarmBlocks
from quire.runner.warm.conditions import can_be_kept, path_for
from quire.runner.warm.model import WarmModel
from quire.runner.warm.start_file import Start, read_start
from quire.runner.warm.warm_runner import WarmRunner


def start_warm(config: EngineConfig, source: ModelSource) -> WarmModel | None:
    """Start a model without torch, as an earlier start has left it; None if it has not. Raises
    ConfigError and OutOfMemory as a start with torch does."""
    path = path_for(config, source)
    start = None if path is None else read_start(path)
    if start is None:
        return None
    spec = with_pooling(load_spec(source.directory), source.directory, config.model)
    if not can_be_kept(spec):
        return None
    return _made(config, source, spec, start)


def _made(
    asked: EngineConfig, source: ModelSource, spec: ModelSpec, start: Start
) -> WarmModel | None:
    config = derive_config(asked, spec, "cpu")
    spec = spec.served_up_to(config.model.max_model_len)
    free = available_cpu_bytes()
    memory = plan_cpu_memory(config, spec, start.weights_bytes, free)
    config = with_length(config, memory.max_model_len)
    if host_tier_limits(config, spec, memory, free) is not None:
        return None
    cache, scheduler, groups = config.cache, config.scheduler, spec.cache_groups
    num_rows, length = scheduler.max_num_seqs, config.model.most_tokens
    assert num_rows and length
    rows = empty_arrays(num_rows, length, len(groups), cache.block_size)
    blocks = WarmBlocks(
        groups, memory.num_blocks, cache.block_size, config.model.dtype, cache.kv_cache_dtype
    )
    runner = WarmRunner(start, rows, blocks)
    dtype = f"torch.{config.model.dtype}"
    return WarmModel(asked, source, runner, config, spec, memory, dtype, start.copy_bytes_per_s)
