"""Build a runner from a configuration: load the model, plan memory, allocate."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from quire.base.errors import ConfigError, OutOfMemory
from quire.base.settings.config import EngineConfig
from quire.base.settings.speculation import parse_speculation
from quire.models.checkpoint.formats import weight_formats
from quire.models.checkpoint.kv_scales import Scales, kv_scales
from quire.models.checkpoint.rank_place import WHOLE, RankPlace
from quire.models.checkpoint.source import ModelSource, load_format_of
from quire.models.draft_model import join, with_drafter
from quire.models.load.adapters import AdaptedModel
from quire.models.load.cache_files import weight_cache
from quire.models.load.loading import LoadOptions, load_model
from quire.models.load.packing import model_bytes
from quire.models.parts.determinism import make_deterministic
from quire.models.parts.pooling_layers import load_pooling_layers
from quire.models.parts.routes import record_routes
from quire.models.registry import model_spec
from quire.models.vision.encoder_size import encoder_size
from quire.ops.attention.base import KVLayout
from quire.ops.attention.context_shared import share_context
from quire.ops.attention.select import NAMES, make_backend
from quire.ops.collective import ALONE
from quire.ops.rows.row_arrays import RowArrays
from quire.runner.adapters import RowAdapters
from quire.runner.attachment import Attachment
from quire.runner.derive import derive_config, with_length
from quire.runner.drafting.draft_steps import VerifyStep, device_runs
from quire.runner.drafting.drafting import (
    DraftPasses,
    make_draft_passes,
    warm_draft_passes,
    with_spare_blocks,
)
from quire.runner.gpu.adapters import adapters_on_gpu, has_device_slots
from quire.runner.media.media import Media, make_media
from quire.runner.memory_plan import (
    WHOLE_MACHINE,
    MachineShare,
    MemoryPlan,
    available_cpu_bytes,
    block_bytes_of,
    host_tier_limits,
    max_read_tokens,
    plan_cpu_memory,
)
from quire.runner.model_runner import DecoderModel, ModelRunner
from quire.runner.native_model import native_or_same
from quire.runner.pooler import Pooler, PoolingStep
from quire.runner.sampling.routed_experts import RoutedExperts
from quire.runner.setup.assemble import as_tensors, assemble, record_graphs
from quire.runner.setup.built import BuiltRunner
from quire.runner.setup.profile import describe_memory, free_gpu_bytes, plan_gpu_memory
from quire.runner.stage import (
    NO_LINKS,
    StageLinks,
    StageModel,
    check_stages,
)
from quire.runner.warm.save_start import save_start
from quire.spec.model_spec import ModelSpec
from quire.spec.pooling_spec import with_pooling

MEASURED_BLOCKS = 32


@dataclass(frozen=True)
class WarmMemory:
    """Memory of a runner without torch, which a runner with torch takes over. plan: its memory
    plan. blocks: bytes of each cache group's blocks. rows: its rows."""

    plan: MemoryPlan
    blocks: tuple[npt.NDArray[np.uint8], ...]
    rows: RowArrays


Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Pools:
    """Numbers of blocks by cache group, on the device and in host memory, and memory taken over."""

    num_blocks: tuple[int, ...]
    host_limits: tuple[int, ...] | None = None
    warm_memory: WarmMemory | None = None


def choose_device(name: str) -> torch.device:
    """Return the named device; `auto` means a GPU if there is one. Raises ConfigError if CUDA is
    requested and absent."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device; use device='cpu'.")
    return torch.device(name)


def _free_bytes(share: MachineShare, device: torch.device) -> int:
    """Return the number of bytes that the runner may use on a device."""
    if device.type == "cpu":
        return share.cpu_bytes(available_cpu_bytes())
    return free_gpu_bytes(device)


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def build_runner(
    config: EngineConfig,
    source: ModelSource,
    progress: Progress | None = None,
    shard: RankPlace = WHOLE,
    share: MachineShare = WHOLE_MACHINE,
    links: StageLinks = NO_LINKS,
    warm_memory: WarmMemory | None = None,
) -> BuiltRunner:
    """Load the model, or a rank's part of it, and allocate its KV pool. links: channels to other
    stages. warm_memory: memory without torch. Raises ModelError, ConfigError, OutOfMemory."""
    impl, is_compiled = config.model.model_impl, config.model.torch_compile
    spec = model_spec(source.directory, impl, is_compiled=is_compiled)
    spec = with_pooling(spec, source.directory, config.model)
    device = choose_device(config.device)
    if shard.num_stages > 1:
        check_stages(config, spec, device.type)
    spec, draft_source = with_drafter(spec, parse_speculation(config.speculative_config), source)
    given_config, config = config, derive_config(config, spec, device.type)
    whole = spec.served_up_to(config.model.max_model_len)
    spec = whole.of_stage(shard.stage, shard.num_stages).of_ranks(
        shard.tensor.size, has_whole_experts=shard.has_whole_experts
    )
    dtype, free = torch_dtype(config.model.dtype), _free_bytes(share, device)
    max_bytes = free if device.type == "cpu" and warm_memory is None else None
    check_bytes = None if max_bytes is None else _early_checks(config, spec, device, free)
    model = _load(config, source, whole, device, shard, progress, max_bytes, check_bytes)
    weights, drafter = model_bytes(model), None
    if draft_source is not None and whole.drafter is not None:
        left = None if max_bytes is None else max_bytes - weights
        on_all = RankPlace(shard.tensor)
        drafter = _load(config, draft_source, whole.drafter, device, on_all, progress, left)
        join(drafter, model, spec.num_layers, max_read_tokens(config))
        weights += model_bytes(drafter)
    spec = replace(spec, encoder=encoder_size(model, whole, shard))
    attachments = _attachments(config, source, spec, model, device)
    if shard.num_stages > 1:
        model = StageModel(model, dtype, links)
    is_fp8 = config.cache.kv_cache_dtype == "fp8" and load_format_of(config, source) != "dummy"
    scales = kv_scales(source.directory, spec) if is_fp8 else {}
    if device.type == "cpu":
        warm = warm_memory
        memory = plan_cpu_memory(config, spec, weights, free) if warm is None else warm.plan
    else:

        def make(
            config: EngineConfig, num_blocks: tuple[int, ...]
        ) -> tuple[ModelRunner, DraftPasses | None]:
            runner = _assemble(config, spec, device, model, shard, Pools(num_blocks), attachments)
            return runner, make_draft_passes(config, spec, drafter, runner, num_blocks)

        memory = plan_gpu_memory(config, spec, device, weights, free, make)
    memory = share.agree(memory, block_bytes := block_bytes_of(config, spec))
    config = with_length(config, memory.max_model_len)
    host = host_tier_limits(config, spec, memory, available_cpu_bytes(), share.num_ranks)
    host = share.agree_on_limits(host, len(spec.cache_groups))
    pools = Pools(memory.num_blocks, host, warm_memory)
    runner = _assemble(config, spec, device, model, shard, pools, attachments, scales)
    if (pooler := _pooler(config, source, spec, device)) is not None:
        runner.head, runner.make_step = pooler, PoolingStep
    record_graphs(runner, config, spec.identity, memory.num_blocks, remembers=share.is_whole)
    rate = copy_rate(runner, device, block_bytes[0], min(memory.num_blocks))
    draft = warm_draft_passes(config, spec, drafter, runner, memory.num_blocks)
    if device.type == "cpu" and share.is_whole and host is None and warm_memory is None:
        save_start(given_config, source, spec, runner.model, weights, rate)
    return BuiltRunner(
        runner,
        config,
        spec,
        memory,
        dtype,
        device,
        runner.backend.name,
        rate,
        host,
        draft,
        draft_source,
        scales,
        runner.model if isinstance(runner.model, StageModel) else None,
    )


def _early_checks(
    config: EngineConfig, spec: ModelSpec, device: torch.device, free_bytes: int
) -> Callable[[int], object]:
    """Make quire's attention backend with the smallest pool, so that one that cannot be used fails
    before weights are read. A plug-in is made once only. Return the check of the weights' bytes."""
    if config.attention_backend in NAMES:
        smallest, cache = (1,) * len(spec.cache_groups), config.cache
        dtype = torch_dtype(config.model.dtype)
        layout = KVLayout(
            spec.cache_groups, smallest, cache.block_size, dtype, device, cache.kv_cache_dtype
        )
        make_backend(config.attention_backend, layout, deterministic=config.deterministic)
    return partial(plan_cpu_memory, config, spec, free_bytes=free_bytes)


def _load(
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    device: torch.device,
    shard: RankPlace,
    progress: Progress | None,
    max_bytes: int | None,
    check_bytes: Callable[[int], object] | None = None,
) -> Any:
    """Load the model into the device's memory. max_bytes: known limit for weights, if any.
    check_bytes: see LoadOptions."""
    dtype, formats = torch_dtype(config.model.dtype), weight_formats(config.model)
    formats.check(config.model.dtype, device.type)
    cache = weight_cache(config.model.weight_cache)
    load_format, seed = load_format_of(config, source), config.model.seed
    try:
        options = LoadOptions(load_format, seed, formats, cache, max_bytes, shard, check_bytes)
        model = load_model(source.directory, spec, dtype, device, options, progress)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the weights of {source.name} ({config.model.dtype}) do not fit on"
            f" {describe_memory(device)}; use a smaller model or dtype, or end other processes on"
            " the GPU."
        ) from error
    if config.deterministic:
        make_deterministic(model)
    if config.model.enable_return_routed_experts:
        record_routes(model)
    return model


def _attachments(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, model: Any, device: torch.device
) -> list[Attachment]:
    """Return the runner's attachments. Adapters are enabled on the model's layers, if the settings
    say so. Raises ConfigError."""
    media = _media(config, source, spec, model)
    found: list[Attachment] = [] if media is None else [media]
    if config.lora.enable_lora:
        found.append(_adapters(config, spec, model, device))
    return found


def _adapters(
    config: EngineConfig, spec: ModelSpec, model: Any, device: torch.device
) -> RowAdapters:
    dtype = torch_dtype(config.model.dtype)
    if device.type != "cpu" or has_device_slots(dtype, device):
        return adapters_on_gpu(config, spec, model, dtype, device)
    return RowAdapters(AdaptedModel(model, spec, config.lora, dtype), config.lora)


def _media(config: EngineConfig, source: ModelSource, spec: ModelSpec, model: Any) -> Media | None:
    """Allocate memory for encoder outputs and return the runner's media attachment."""
    if spec.encoder is not None:
        model.take_encoder_memory(config.scheduler.encoder_cache_tokens)
    return make_media(model, source.directory)


def _pooler(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, device: torch.device
) -> Pooler | None:
    """Return the pooler, or None for a model that generates."""
    num_rows = config.scheduler.max_num_seqs
    if spec.pooling is None or num_rows is None:
        return None
    load_format, seed = load_format_of(config, source), config.model.seed
    layers = load_pooling_layers(source.directory, spec, device, load_format, seed)
    return Pooler(spec.pooling, layers, num_rows, spec.hidden_size, device)


def copy_rate(
    runner: ModelRunner, device: torch.device, block_bytes: int, num_blocks: int
) -> float:
    """Measure bytes per second of swapping some blocks out. The second run is timed, after the
    first one has allocated the host memory."""
    num = min(num_blocks, MEASURED_BLOCKS)
    blocks = np.arange(num, dtype=np.int32)
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        runner.backend.swap_out(0, blocks, blocks)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    if runner.backend.host_blocks is not None:
        runner.backend.host_blocks.free_mirrors()
    return num * block_bytes / max(seconds[-1], 1e-9)


def _assemble(
    config: EngineConfig,
    spec: ModelSpec,
    device: torch.device,
    model: DecoderModel,
    shard: RankPlace,
    pools: Pools,
    attachments: Sequence[Attachment],
    scales: Scales | None = None,
) -> ModelRunner:
    num_blocks, warm_memory = pools.num_blocks, pools.warm_memory
    cache, dtype = config.cache, torch_dtype(config.model.dtype)
    limits = pools.host_limits or (0,) * len(num_blocks)
    host_blocks = tuple(max(pair) for pair in zip(num_blocks, limits, strict=True))
    size, kv_format = cache.block_size, cache.kv_cache_dtype
    num_blocks = with_spare_blocks(config, spec, num_blocks)
    given = () if warm_memory is None else warm_memory.blocks
    layout = KVLayout(
        spec.cache_groups, num_blocks, size, dtype, device, kv_format, host_blocks, given
    )
    num_rows, length = config.scheduler.max_num_seqs, config.model.row_capacity
    assert num_rows and length
    backend = share_context(
        layout,
        lambda part: make_backend(
            config.attention_backend, part, scales, deterministic=config.deterministic
        ),
        shard.context,
    )
    sizes = num_rows, length, len(spec.cache_groups), config.cache.block_size
    native: DecoderModel
    group = shard.tensor
    if isinstance(model, StageModel):
        native = model.native(backend)
        group = group if model.is_last else ALONE  # only the last stage samples
    else:
        native = native_or_same(model, backend)
    state = None if warm_memory is None else as_tensors(warm_memory.rows)
    runner = assemble(config, native, backend, sizes, spec.vocab_size, device, group, state)
    runner.make_draft_step = partial(VerifyStep, runs=device_runs(config))
    runner.attachments += attachments
    if config.model.enable_return_routed_experts and spec.experts is not None:
        runner.attachments.append(RoutedExperts(runner, spec.experts))
    return runner
