"""Starting without torch: whether that is possible, and with what."""

from pathlib import Path

from quire.base.cache_group import FULL, WINDOW
from quire.base.config import EngineConfig
from quire.base.model_spec import QUIRE, ModelSpec, load_spec
from quire.base.pooling_spec import with_pooling
from quire.base.speculation import FORCED, NONE, parse_speculation
from quire.base.text_config import PART_OF
from quire.models.cache_files import weight_cache
from quire.models.source import ModelSource
from quire.ops.native import core
from quire.runner.derive import derive_config, with_length
from quire.runner.memory_plan import available_cpu_bytes, host_tier_limits, plan_cpu_memory
from quire.runner.warm.blocks import WarmBlocks
from quire.runner.warm.model import WarmModel
from quire.runner.warm.rows import WarmRows
from quire.runner.warm.start_file import Start, read_start, start_path
from quire.runner.warm.warm_runner import WarmRunner

GPUS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # devices that torch may find a GPU behind


def path_for(config: EngineConfig, source: ModelSource) -> Path | None:
    """Return where the start of an engine with these settings is kept; None if it has to be one
    with torch."""
    cache, parallel = weight_cache(config.model.weight_cache), config.parallel
    on_cpu = config.device == "cpu" or not any(map(Path.exists, map(Path, GPUS)))
    speculation = parse_speculation(config.speculative_config)
    is_simple = not (
        (speculation is not None and speculation.method not in (FORCED, NONE))
        or config.logits_processors
        or config.deterministic
        or config.cache.stores
        or config.cache.kv_host_gb
        or parallel.has_rank_processes
        or (config.scheduler.pipeline_depth or 1) > 1
    )
    is_served = config.attention_backend in ("auto", "cpu") and config.device != "cuda"
    is_served = is_served and config.cache.kv_cache_dtype in ("auto", "int8")
    if cache is None or core() is None or not (on_cpu and is_simple and is_served):
        return None
    return start_path(cache, config, source)


def can_be_kept(spec: ModelSpec) -> bool:
    """Tell whether a start with such a model, of quire's own classes, can do without torch."""
    kinds = {group.kind for group in spec.cache_groups}
    is_own = spec.implementation == QUIRE and PART_OF not in spec.raw
    return is_own and spec.pooling is None and kinds <= {FULL, WINDOW}


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
    rows = WarmRows(num_rows, length, len(groups), cache.block_size)
    blocks = WarmBlocks(
        groups, memory.num_blocks, cache.block_size, config.model.dtype, cache.kv_cache_dtype
    )
    windows = [group.window or 0 for group in groups]
    shapes = [(group.num_kv_heads, group.head_dim) for group in groups]
    runner = WarmRunner(start, rows, blocks, windows, shapes)
    dtype = f"torch.{config.model.dtype}"
    return WarmModel(asked, source, runner, config, spec, memory, dtype, start.copy_bytes_per_s)
