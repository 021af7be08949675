"""The inputs of a memory plan: a model on a device, with its tensors, ranks and draft model."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.base.errors import ModelError
from quire.base.settings.config import AUTO_LENGTH, EngineConfig
from quire.kv.sizing import min_pool_bytes
from quire.models.checkpoint.files import has_weights, safetensors_shapes, weight_files
from quire.models.checkpoint.formats import AS_THEY_ARE, StoredFormat, weight_formats
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.source import ModelSource
from quire.models.gguf.names import is_prediction_layer, our_names
from quire.models.gguf.repacked import Q8_0
from quire.models.gguf.stored import format_of, stored_formats_of_parts
from quire.models.outline import (
    HEAD,
    LINEAR,
    FormatBytes,
    Outline,
    Stored,
    outline,
    planned_weights,
)
from quire.models.quantised.parts import quantised_parts
from quire.ops.weights.formats import Packing, core_packing
from quire.runner.derive import cpu_flags
from quire.runner.memory_plan import (
    GPU_CONTEXT_BYTES,
    MemoryPlan,
    block_bytes_of,
    cpu_pool_budget,
    estimated_graph_bytes,
    gpu_pool_budget,
    make_plan,
    plan_cpu_memory,
    workspace_of,
)
from quire.spec.gguf.container import GGUFFile, TensorKind, is_gguf
from quire.spec.gguf.metadata import OF_CONFIG
from quire.spec.model_spec import ModelSpec
from quire.tools.devices import CPU, Device

ANY: tuple[int, ...] = ()  # stands for a shape that is not compared
SHORTEST = 2  # tokens: a prompt of one token and its answer


@dataclass(frozen=True)
class StoredTensors:
    """The tensors in the headers of the weight files, or the reason why there are none."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Question:
    """A model on a device, with all inputs of the plan."""

    name: str
    spec: ModelSpec
    own: ModelSpec  # numbers of the rank on this device
    device: Device
    outline: Outline
    file: GGUFFile | None  # GGUF file of the model, if it is one
    tensors: StoredTensors
    place: RankPlace
    drafter: "Question | None" = None  # the draft model

    def weights(self, config: EngineConfig) -> list[FormatBytes]:
        """Return the packed weights by format; the draft model's come last."""
        drafted = [] if self.drafter is None else self.drafter.weights(config)
        draft_weights = [
            FormatBytes(f"draft model {each.name}", each.num_bytes) for each in drafted
        ]
        return [*self._own_weights(config), *draft_weights]

    def _own_weights(self, config: EngineConfig) -> list[FormatBytes]:
        formats = weight_formats(config.model)
        packing = _packing(self.device, config)
        stored: Stored = {}
        in_core = self.device.kind == CPU and packing.panel
        is_dummy = config.model.load_format == "dummy"
        if self.file is not None and formats == AS_THEY_ARE and in_core and not is_dummy:
            stored = stored_formats_of_parts(self.file, self.spec, self.outline.parts)
        elif formats == AS_THEY_ARE and not is_dummy and config.model.dtype != "float64":
            stored = quantised_parts(self.spec, self.outline.parts, is_gpu=packing.is_gpu)
        return planned_weights(self.outline.parts, packing, formats, stored)

    def weights_bytes(self, config: EngineConfig) -> int:
        return sum(each.num_bytes for each in self.weights(config))

    def gguf_bytes(self, config: EngineConfig, kind: TensorKind) -> int:
        """Return the packed bytes of the weights from a GGUF file of this format. Matrices whose
        rows are not whole blocks are in Q8_0, as llama.cpp's converter makes similar choices."""
        stored: dict[int, StoredFormat] = {}
        for index, part in enumerate(self.outline.parts):
            each = next((k for k in (kind, Q8_0) if part.shape[-1] % k.block_size == 0), None)
            if part.kind in (LINEAR, HEAD) and len(part.shape) == 2 and each is not None:
                stored[index] = StoredFormat(((part.shape[0], format_of(each)),), as_blocks=True)
        packing = _packing(self.device, config)
        own = planned_weights(self.outline.parts, packing, AS_THEY_ARE, stored)
        drafted = 0 if self.drafter is None else self.drafter.weights_bytes(config)
        return sum(each.num_bytes for each in own) + drafted

    def plan(self, config: EngineConfig, weights_bytes: int) -> MemoryPlan:
        """Return the memory plan. Raises OutOfMemory."""
        total = self.device.memory_bytes
        if self.device.kind == CPU:
            return plan_cpu_memory(config, self.own, weights_bytes, total)
        budget = max(0, self.budget(config, weights_bytes))
        workspace = workspace_of(config, self.own)
        plan = make_plan(config, self.own, weights_bytes, workspace, budget, total)
        return dataclasses.replace(plan, graph_bytes=estimated_graph_bytes(config, self.own))

    def budget(self, config: EngineConfig, weights_bytes: int) -> int:
        """Return the bytes left for the pool, ignoring kv_cache_memory_bytes; may be negative."""
        total, workspace = self.device.memory_bytes, workspace_of(config, self.own)
        if self.device.kind == CPU:
            return cpu_pool_budget(total, weights_bytes, workspace)
        used = weights_bytes + GPU_CONTEXT_BYTES
        share, taken = config.cache.gpu_memory_utilization, workspace
        taken += estimated_graph_bytes(config, self.own)
        return gpu_pool_budget(total, share, used, total - used, taken)

    def min_pool_bytes_of(self, config: EngineConfig) -> int:
        """Return the bytes of a pool for one request of max_model_len, or for any one if it is
        auto."""
        length, scheduler = config.model.max_model_len, config.scheduler
        assert length and scheduler.max_num_seqs and scheduler.max_num_batched_tokens
        return min_pool_bytes(
            self.own.cache_groups,
            block_bytes_of(config, self.own),
            config.cache.block_size,
            SHORTEST if length == AUTO_LENGTH else length,
            scheduler.max_num_seqs,
            scheduler.max_num_batched_tokens,
        )


def make_question(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, device: Device, place: RankPlace
) -> Question:
    file = GGUFFile(source.directory) if is_gguf(source.directory) else None
    tensors = _stored_tensors(spec, config, source, file)
    made = outline(spec, config.model.dtype, tensors.shapes, place)
    own = spec.of_stage(place.stage, place.num_stages).of_ranks(
        place.tensor.size, has_whole_experts=place.has_whole_experts
    )
    own = dataclasses.replace(own, encoder=made.encoder)
    return Question(source.name, spec, own, device, made, file, tensors, place)


def _packing(device: Device, config: EngineConfig) -> Packing:
    """Return how the device stores weights."""
    dtype = config.model.dtype
    if device.kind != CPU:
        return Packing(dtype, is_gpu=dtype != "float64")
    return core_packing(dtype) or Packing(dtype, is_reordered=_is_reordered(dtype))


def has_int8(device: Device, config: EngineConfig) -> bool:
    """Return whether the device supports integers for weights, keys and values."""
    packing = _packing(device, config)
    return packing.is_gpu or packing.panel > 0


def _is_reordered(dtype: str) -> bool:
    """Return whether oneDNN, the fallback for the C++ core, reorders weights of this dtype.

    ops/weights/device_weights.can_pack derives the same from torch."""
    fast = bool(cpu_flags() & {"avx512bw", "avx512_bf16", "amx_bf16", "bf16"})
    return dtype == "float32" or (dtype == "bfloat16" and fast)


def replaced(config: EngineConfig, **settings: object) -> EngineConfig:
    """Return the config with other settings, given by flat names."""
    parts = {}
    for part in ("model", "cache", "scheduler"):
        owner = getattr(config, part)
        names = {item.name for item in dataclasses.fields(owner)} & settings.keys()
        parts[part] = dataclasses.replace(owner, **{name: settings[name] for name in names})
    return dataclasses.replace(config, **parts)


def _stored_tensors(
    spec: ModelSpec, config: EngineConfig, source: ModelSource, file: GGUFFile | None
) -> StoredTensors:
    """Read names and shapes of the weight files' tensors.

    A GGUF file's shapes are not compared, because some are transposed."""
    if "dummy" in (source.load_format, config.model.load_format):
        return StoredTensors()
    if file is not None:
        places = [p for p in file.tensors.values() if p.name not in OF_CONFIG]
        places = [p for p in places if not is_prediction_layer(p.name, spec)]
        return StoredTensors({name: ANY for p in places for name in our_names(p, spec)})
    if not has_weights(source.directory):
        problem = "only the config was checked: there are no weight files next to it"
        return StoredTensors(problem=problem)
    try:
        return StoredTensors(safetensors_shapes(weight_files(source.directory)))
    except ModelError as error:
        return StoredTensors(problem=f"the weight files could not be checked: {error}")
