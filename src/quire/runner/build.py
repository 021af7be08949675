"""From a configuration to a runner: load, plan memory, allocate."""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quire.base.config import AUTO_LENGTH, EngineConfig
from quire.base.errors import ConfigError, OutOfMemory
from quire.base.model_spec import ModelSpec, load_spec
from quire.base.plan import BlockWrites, Plan, RowStart
from quire.base.sampling_params import SamplingParams
from quire.kv.sizing import MemoryPlan, host_tier_blocks
from quire.models.formats import weight_formats
from quire.models.loading import load_model
from quire.models.packing import model_bytes
from quire.models.source import ModelSource
from quire.models.weight_cache import weight_cache
from quire.ops.attention.base import KVLayout
from quire.ops.attention.select import make_backend
from quire.runner.derive import derive_config
from quire.runner.memory import (
    available_cpu_bytes,
    block_bytes_of,
    gpu_pool_budget,
    make_plan,
    plan_cpu_memory,
)
from quire.runner.model_runner import DecoderModel, ModelRunner
from quire.runner.native_model import native_or_same
from quire.runner.rows import DeviceRows
from quire.runner.sampler import Sampler

MEASURED_BLOCKS = 32
PASSING_BYTES = 64 << 20, 1 << 30  # of host memory for blocks between the pool and a store

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BuiltRunner:
    """A runner and what it was made from. config: with all derived values filled in."""

    runner: ModelRunner
    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan
    dtype: torch.dtype
    device: torch.device
    backend_name: str
    copy_bytes_per_s: float = 0.0
    host_limits: tuple[int, ...] | None = None  # blocks of the host tier, by cache group


def choose_device(name: str) -> torch.device:
    """Raises ConfigError if CUDA is asked for and absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device; use device='cpu'.")
    return torch.device(name)


def torch_dtype(name: str) -> torch.dtype:
    """Of a dtype's name in the configuration."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def build_runner(
    config: EngineConfig, source: ModelSource, progress: Progress | None = None
) -> BuiltRunner:
    """Load the model and make its KV pool. Raises ModelError, ConfigError, OutOfMemory."""
    spec = load_spec(source.directory)
    device = choose_device(config.device)
    config = derive_config(config, spec, device.type)
    dtype = torch_dtype(config.model.dtype)
    formats = weight_formats(config.model)
    formats.check(config.model.dtype, device.type)
    free = available_cpu_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    load_format = (
        source.load_format if config.model.load_format == "auto" else config.model.load_format
    )
    cache = weight_cache(config.model.weight_cache)
    seed = config.model.seed
    model = load_model(
        source.directory, spec, dtype, device, load_format, seed, progress, formats, cache
    )
    if device.type == "cpu":
        memory = plan_cpu_memory(config, spec, model_bytes(model), free)
    else:
        memory = _plan_gpu_memory(config, spec, dtype, device, model)
    config = _with_length(config, memory.max_model_len)
    host = _host_tier(config, spec, device, memory)
    runner = _assemble(config, spec, dtype, device, model, memory.num_blocks, host)
    block_bytes = block_bytes_of(config, spec)[0]
    rate = copy_rate(runner, device, block_bytes, min(memory.num_blocks))
    name = runner.backend.name
    return BuiltRunner(runner, config, spec, memory, dtype, device, name, rate, host)


def _host_tier(
    config: EngineConfig, spec: ModelSpec, device: torch.device, memory: MemoryPlan
) -> tuple[int, ...] | None:
    """Blocks of host memory for what the pool has no room for, by cache group; None: no tier.

    If nothing was asked for, a GPU gets as many as its pool has, in a quarter of the free memory,
    and stores pass through a little. Raises ConfigError for more than there is."""
    cache = config.cache
    has_stores = bool(cache.stores)
    if not cache.enable_prefix_caching or (cache.kv_host_gb == 0 and not has_stores):
        return None
    if cache.kv_host_gb is None and device.type == "cpu" and not has_stores:
        return None
    free = available_cpu_bytes()
    num_bytes = min(memory.pool_bytes, free // 4)
    if has_stores and (device.type == "cpu" or cache.kv_host_gb == 0):
        num_bytes = min(max(memory.pool_bytes, PASSING_BYTES[0]), PASSING_BYTES[1], free // 4)
    if cache.kv_host_gb:
        num_bytes = int(cache.kv_host_gb * 1e9)
    if num_bytes > free:
        raise ConfigError(
            f"kv_host_gb={cache.kv_host_gb:g} is more than the free memory ({free / 1e9:.1f} GB)."
        )
    sizes = block_bytes_of(config, spec)
    limits = host_tier_blocks(sizes, num_bytes)
    if cache.kv_host_gb and not all(limits):
        raise ConfigError(
            f"kv_host_gb={cache.kv_host_gb:g} holds no block; one takes {sum(sizes) / 1e6:.1f} MB."
        )
    return limits if all(limits) else None


def copy_rate(
    runner: ModelRunner, device: torch.device, block_bytes: int, num_blocks: int
) -> float:
    """Bytes per second of swapping some blocks out, the second time; host memory is taken first."""
    num = min(num_blocks, MEASURED_BLOCKS)
    blocks = np.arange(num, dtype=np.int32)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        runner.backend.swap_out(0, blocks, blocks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    host_blocks = getattr(runner.backend, "host_blocks", None)
    if host_blocks is not None:
        host_blocks.give_back()
    return num * block_bytes / max(seconds[-1], 1e-9)


def _with_length(config: EngineConfig, length: int) -> EngineConfig:
    model = dataclasses.replace(config.model, max_model_len=length)
    return dataclasses.replace(config, model=model)


def _assemble(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    model: DecoderModel,
    num_blocks: tuple[int, ...],
    host_limits: tuple[int, ...] | None = None,
) -> ModelRunner:
    cache = config.cache
    limits = host_limits or (0,) * len(num_blocks)
    host_blocks = tuple(max(pair) for pair in zip(num_blocks, limits, strict=True))
    size, kv_format = cache.block_size, cache.kv_cache_dtype
    layout = KVLayout(spec.cache_groups, num_blocks, size, dtype, device, kv_format, host_blocks)
    num_rows, length = config.scheduler.max_num_seqs, config.model.max_model_len
    assert num_rows and length
    rows = DeviceRows(num_rows, length, len(spec.cache_groups), config.cache.block_size, device)
    sampler = Sampler(num_rows, spec.vocab_size, device)
    backend = make_backend(config.attention_backend, layout)
    return ModelRunner(native_or_same(model, backend), backend, rows, sampler)


def _plan_gpu_memory(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    model: torch.nn.Module,
) -> MemoryPlan:
    """Run the largest step once and see what it takes; the pool gets what is left of our share."""
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    is_auto = config.model.max_model_len == AUTO_LENGTH
    largest = _with_length(config, spec.max_position) if is_auto else config
    try:
        plan, num_blocks = worst_case_plan(largest, len(spec.cache_groups), spec.vocab_size)
        _assemble(largest, spec, dtype, device, model, num_blocks).run(plan)
    except torch.cuda.OutOfMemoryError as error:
        raise OutOfMemory(
            f"a step of {config.scheduler.max_num_batched_tokens} tokens does not fit beside the "
            "weights; lower max_num_batched_tokens or max_num_seqs."
        ) from error
    workspace = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    used = total - free  # by this process and all others
    budget = gpu_pool_budget(total, config.cache.gpu_memory_utilization, used, workspace)
    return make_plan(config, spec, model_bytes(model), workspace, max(0, budget), total)


def worst_case_plan(
    config: EngineConfig, num_groups: int, vocab_size: int
) -> tuple[Plan, tuple[int, ...]]:
    """A step of max_num_batched_tokens tokens in which as many rows as possible sample with every
    filter on; and the pool that it needs. All rows write the same blocks: harmless here."""
    scheduler, size = config.scheduler, config.cache.block_size
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    assert config.model.max_model_len
    num_rows = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
    share = min(scheduler.max_num_batched_tokens // num_rows, config.model.max_model_len - 1)
    params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1)
    tokens = np.arange(share, dtype=np.int32) % vocab_size
    starts = tuple(RowStart(r, tokens, 0, share, params, seed=r) for r in range(num_rows))
    num_blocks = -(-share // size)
    group, row, index = np.meshgrid(
        np.arange(num_groups), np.arange(num_rows), np.arange(num_blocks), indexing="ij"
    )
    columns = [a.ravel().astype(np.int32) for a in (group, row, index, index)]
    rows = np.arange(num_rows, dtype=np.int32)
    plan = Plan(
        step_id=-1,
        rows=rows,
        num_tokens=np.full(num_rows, share, np.int32),
        computed_bound=np.zeros(num_rows, np.int32),
        sample_rows=rows,
        num_candidates=np.full(num_rows, -1, np.int32),
        started=starts,
        block_writes=BlockWrites(*columns),
    )
    return plan, (num_blocks,) * num_groups
