"""Preview of a runner, computed without loading weights (`quire doctor`)."""

from dataclasses import dataclass, replace

import torch

from quire.base.settings.config import EngineConfig
from quire.base.settings.speculation import parse_speculation
from quire.models.checkpoint.files import has_weights, weight_files
from quire.models.checkpoint.formats import weight_formats
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.source import ModelSource, load_format_of
from quire.models.draft_model import with_drafter
from quire.models.load.loading import check_files, formats_of_file
from quire.models.load.packing import Stored, planned_bytes
from quire.models.model import Model
from quire.models.registry import make_model, model_spec
from quire.models.vision.encoder_size import encoder_size
from quire.ops.attention.base import KVLayout
from quire.ops.attention.select import make_backend
from quire.ops.collective import FirstOf
from quire.ops.host.threads import num_threads
from quire.runner.build import choose_device, torch_dtype
from quire.runner.derive import derive_config
from quire.runner.memory_plan import MemoryPlan, available_cpu_bytes, plan_cpu_memory
from quire.runner.setup.step_size import first_budget
from quire.spec.media_families import EncoderSize
from quire.spec.model_spec import ModelSpec
from quire.spec.pooling_spec import with_pooling


@dataclass(frozen=True)
class Preview:
    """Preview of a runner; if ranks share layers, of each rank. config: with all derived values
    filled in. memory: None on a GPU, where it is measured when the engine starts. first_budget:
    tokens of the first steps, if the engine then adapts the budget to the measured time. runs_by:
    source of the model's class. encoder: of its vision tower, or None."""

    config: EngineConfig
    attention_backend: str
    weights_bytes: int
    memory: MemoryPlan | None
    first_budget: int | None = None
    runs_by: str = ""
    encoder: EncoderSize | None = None


def preview_runner(config: EngineConfig, source: ModelSource) -> Preview:
    """Return the preview of a runner. Raises ModelError, ConfigError and OutOfMemory as
    `build_runner` does, but weight files may be absent."""
    spec = model_spec(
        source.directory, config.model.model_impl, is_compiled=config.model.torch_compile
    )
    spec = with_pooling(spec, source.directory, config.model)
    device = choose_device(config.device)
    spec, draft_source = with_drafter(spec, parse_speculation(config.speculative_config), source)
    num_ranks = config.parallel.tensor_parallel_size
    own, shard = spec.of_ranks(num_ranks), RankPlace(FirstOf(num_ranks))
    is_given = config.scheduler.max_num_batched_tokens is not None
    config = derive_config(config, spec, device.type)
    dtype = torch_dtype(config.model.dtype)
    weight_formats(config.model).check(config.model.dtype, device.type)
    model, weights = _outline(config, source, spec, device, shard)
    own = replace(own, encoder=encoder_size(model, spec, shard))
    if draft_source is not None and spec.drafter is not None:
        weights += _outline(config, draft_source, spec.drafter, device, shard)[1]
    memory = None
    if device.type == "cpu":
        memory = plan_cpu_memory(config, own, weights, available_cpu_bytes() // num_ranks)
    smallest = (1,) * len(own.cache_groups)
    cache = config.cache
    layout = KVLayout(
        own.cache_groups, smallest, cache.block_size, dtype, device, cache.kv_cache_dtype
    )
    backend = make_backend(config.attention_backend, layout, deterministic=config.deterministic)
    follows = device.type == "cpu" and not is_given and not spec.is_encoder
    first = first_budget(config, spec, num_threads()) if follows else None
    runs_by = model.runs_by if isinstance(model, Model) else "another package's class"
    return Preview(config, backend.name, weights, memory, first, runs_by, own.encoder)


def _outline(
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    device: torch.device,
    shard: RankPlace,
) -> tuple[Model, int]:
    """Build a model without memory; also return the bytes that its weights would use."""
    dtype, formats = torch_dtype(config.model.dtype), weight_formats(config.model)
    model = make_model(spec, dtype, torch.device("meta"), shard)
    stored: Stored = {}
    if load_format_of(config, source) != "dummy":
        stored = formats_of_file(source.directory, spec, model, dtype, device, formats)
        if has_weights(source.directory):
            check_files(weight_files(source.directory), spec, shard)
    return model, planned_bytes(model, dtype, device, formats, stored)


def free_and_total_bytes(device: str) -> tuple[int, int]:
    """Return the free and the total bytes of a type of device. On a CPU, both are the bytes that
    this process may still use."""
    if device == "cpu":
        available = available_cpu_bytes()
        return available, available
    free, total = torch.cuda.mem_get_info()
    return free, total


@dataclass(frozen=True)
class TorchFacts:
    """Facts about torch. num_threads: of one operation. gpus: (name, bytes, compute capability)."""

    version: str
    cuda: str | None
    num_threads: int
    gpus: tuple[tuple[str, int, str], ...]


def torch_facts() -> TorchFacts:
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        known = torch.cuda.get_device_properties(index)
        gpus.append((known.name, known.total_memory, f"{known.major}.{known.minor}"))
    version = str(torch.__version__)
    return TorchFacts(version, torch.version.cuda, torch.get_num_threads(), tuple(gpus))
