"""Compute whether a model fits a device: weights, KV pool and requests, without loading anything.

The plan is the engine's own (runner/memory_plan.py, kv/sizing.py, ops/weights/formats.py). It uses
the config and the headers of the weight files; no weight is read. A GPU's workspace, which the
engine measures, is estimated from the model's shape.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from quire.base.errors import ConfigError, ModelError, OutOfMemory
from quire.base.settings.config import AUTO_LENGTH, EngineConfig
from quire.base.settings.speculation import parse_speculation
from quire.kv.sizing import MIB, min_pool_bytes, sequences_that_fit
from quire.models.checkpoint.files import has_weights, listed, safetensors_shapes, weight_files
from quire.models.checkpoint.formats import AS_THEY_ARE, weight_formats
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.source import CONFIG_ONLY, ModelSource
from quire.models.draft_model import with_drafter
from quire.models.gguf.names import our_names
from quire.models.gguf.stored import stored_formats_of_parts
from quire.models.load.loading import check_files
from quire.models.outline import (
    FormatBytes,
    Outline,
    Stored,
    outline,
    planned_weights,
)
from quire.models.quantised.parts import quantised_parts
from quire.models.registry import model_spec
from quire.ops.collective import FirstOf
from quire.ops.weights.formats import Packing, core_packing
from quire.runner.derive import cpu_flags, derive_config
from quire.runner.memory_plan import (
    GPU_CONTEXT_BYTES,
    MemoryPlan,
    block_bytes_of,
    cpu_pool_budget,
    encoder_cache_bytes,
    encoding_bytes,
    estimated_graph_bytes,
    gpu_pool_budget,
    largest_item,
    make_plan,
    plan_cpu_memory,
    workspace_of,
)
from quire.runner.stage import check_stages
from quire.spec.cache_group import STATE
from quire.spec.gguf.container import GGUFFile, is_gguf
from quire.spec.gguf.metadata import OF_CONFIG
from quire.spec.model_spec import ModelSpec
from quire.spec.pooling_spec import with_pooling
from quire.tools.devices import CPU, Device

LENGTHS = (512, 2048, 8192)
TIGHT_UTILIZATION = 0.97
FEW_TOKENS = 2048
FP8_GPUS = "GPUs from 8.9 on"
SHORTEST = 2  # tokens: a prompt of one token and its answer
ANY: tuple[int, ...] = ()  # stands for a shape that is not compared


@dataclass(frozen=True)
class GroupFit:
    """A cache group. Bytes cover all its layers; a block may be a state."""

    kind: str
    window: int | None
    num_layers: int
    token_bytes: int
    block_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class Requests:
    """The number of requests of one length that fit at the same time."""

    length: int
    at_once: int  # within max_num_seqs
    by_memory: int  # without that limit


@dataclass(frozen=True)
class Alternative:
    """The plan with other formats."""

    weights: str
    kv: str
    weights_bytes: int
    pool_bytes: int
    num_slots: int
    at_once: int  # requests of max_model_len; 0 if the model does not fit
    note: str = ""  # reason why it is impossible, or a mark of the requested formats


@dataclass(frozen=True)
class Fit:
    """The plan of a model on a device."""

    model: str
    spec: ModelSpec
    device: Device
    config: EngineConfig  # with all derived values
    weights: tuple[FormatBytes, ...]  # by format, largest first
    memory: MemoryPlan
    groups: tuple[GroupFit, ...]
    requests: tuple[Requests, ...]
    alternatives: tuple[Alternative, ...]
    warnings: tuple[str, ...]
    largest_item: int = 0  # tokens of the largest media item
    encoding_bytes: int = 0  # part of the workspace: the vision tower's memory for that item
    encoder_cache_bytes: int = 0  # part of the workspace: slots


@dataclass(frozen=True)
class _StoredTensors:
    """The tensors in the headers of the weight files, or the reason why there are none."""

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class _Question:
    """A model on a device, with all inputs of the plan."""

    name: str
    spec: ModelSpec
    own: ModelSpec  # numbers of the rank on this device
    device: Device
    outline: Outline
    file: GGUFFile | None  # GGUF file of the model, if it is one
    tensors: _StoredTensors
    place: RankPlace
    drafter: "_Question | None" = None  # the draft model

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


def fit(config: EngineConfig, source: ModelSource, device: Device) -> Fit:
    """Return the plan of a model on a device. The config's own device is ignored.

    With pipeline stages, the plan is of the stage with the smallest number of blocks. Raises
    ModelError and ConfigError as the engine would. Raises OutOfMemory if the model does not fit;
    the message holds the missing size and settings that help.
    """
    spec = model_spec(
        source.directory, config.model.model_impl, is_compiled=config.model.torch_compile
    )
    spec = with_pooling(spec, source.directory, config.model)
    speculation = parse_speculation(config.speculative_config)
    spec, draft_source = with_drafter(spec, speculation, CONFIG_ONLY)
    num_ranks = config.parallel.tensor_parallel_size
    num_stages = config.parallel.pipeline_parallel_size
    if num_stages > 1:
        check_stages(config, spec, device.kind)
    if device.kind == CPU:  # cores share its memory, and ranks share their core's part
        num_cores = config.parallel.data_parallel_size
        memory_bytes = device.memory_bytes // num_cores // (num_ranks * num_stages)
        device = dataclasses.replace(device, memory_bytes=memory_bytes)
    whole = config.parallel.enable_expert_parallel
    places = [
        RankPlace(FirstOf(num_ranks), stage, num_stages, whole) for stage in range(num_stages)
    ]
    found = [_fit_rank(config, source, device, place, spec, draft_source) for place in places]
    return min(found, key=lambda each: each.memory.num_slots)


def _fit_rank(
    config: EngineConfig,
    source: ModelSource,
    device: Device,
    place: RankPlace,
    spec: ModelSpec,
    draft_source: ModelSource | None,
) -> Fit:
    """Return the plan of one rank. spec: the whole model."""
    config = derive_config(config, spec, device.kind)
    if device.kind == CPU or config.model.dtype == "float64":
        weight_formats(config.model).check(config.model.dtype, device.kind)
    question = _question(config, source, spec, device, place)
    own = question.own
    if draft_source is not None and spec.drafter is not None:
        drafter = _question(config, draft_source, spec.drafter, device, place)
        question = dataclasses.replace(question, drafter=drafter)
    weights = question.weights(config)
    total = sum(each.num_bytes for each in weights)
    try:
        memory = question.plan(config, total)
    except OutOfMemory as error:
        raise OutOfMemory(_why_not(question, config, total)) from error
    config = _replaced(config, max_model_len=memory.max_model_len)
    return Fit(
        model=source.name,
        spec=spec,
        device=device,
        config=config,
        weights=tuple(weights),
        memory=memory,
        groups=_groups(config, own, memory),
        requests=_requests(config, own, memory),
        alternatives=tuple(_alternatives(question, config)),
        warnings=(*_warnings(question, config, total), *_differences(question, source)),
        largest_item=_largest_item(config, own),
        encoding_bytes=encoding_bytes(config, own),
        encoder_cache_bytes=encoder_cache_bytes(config, own),
    )


def _question(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, device: Device, place: RankPlace
) -> _Question:
    file = GGUFFile(source.directory) if is_gguf(source.directory) else None
    tensors = _stored_tensors(spec, config, source, file)
    made = outline(spec, config.model.dtype, tensors.shapes, place)
    own = spec.of_stage(place.stage, place.num_stages).of_ranks(
        place.tensor.size, has_whole_experts=place.has_whole_experts
    )
    own = dataclasses.replace(own, encoder=made.encoder)
    return _Question(source.name, spec, own, device, made, file, tensors, place)


def _packing(device: Device, config: EngineConfig) -> Packing:
    """Return how the device stores weights."""
    dtype = config.model.dtype
    if device.kind != CPU:
        return Packing(dtype, is_gpu=dtype != "float64")
    return core_packing(dtype) or Packing(dtype, is_reordered=_is_reordered(dtype))


def _has_int8(device: Device, config: EngineConfig) -> bool:
    """Return whether the device supports integers for weights, keys and values."""
    packing = _packing(device, config)
    return packing.is_gpu or packing.panel > 0


def _is_reordered(dtype: str) -> bool:
    """Return whether oneDNN, the fallback for the C++ core, reorders weights of this dtype.

    ops/weights/device_weights.can_pack derives the same from torch."""
    fast = bool(cpu_flags() & {"avx512bw", "avx512_bf16", "amx_bf16", "bf16"})
    return dtype == "float32" or (dtype == "bfloat16" and fast)


def _largest_item(config: EngineConfig, spec: ModelSpec) -> int:
    return 0 if spec.encoder is None else largest_item(config, spec.encoder, spec.max_position)


def _groups(config: EngineConfig, spec: ModelSpec, memory: MemoryPlan) -> tuple[GroupFit, ...]:
    sizes = zip(spec.cache_groups, block_bytes_of(config, spec), memory.num_blocks, strict=True)
    return tuple(
        GroupFit(
            kind=group.kind,
            window=group.window,
            num_layers=len(group.layers),
            token_bytes=0 if group.kind == STATE else num_bytes // config.cache.block_size,
            block_bytes=num_bytes,
            num_blocks=num_blocks,
        )
        for group, num_bytes, num_blocks in sizes
    )


def _requests(config: EngineConfig, spec: ModelSpec, memory: MemoryPlan) -> tuple[Requests, ...]:
    max_length = memory.max_model_len
    lengths = [*(length for length in LENGTHS if length < max_length), max_length]
    return tuple(_requests_of(length, config, spec, memory) for length in lengths)


def _requests_of(
    length: int, config: EngineConfig, spec: ModelSpec, memory: MemoryPlan
) -> Requests:
    rows = config.scheduler.max_num_seqs or 0
    fitting = sequences_that_fit(spec.cache_groups, memory.num_blocks, memory.block_size, length)
    return Requests(length, min(rows, fitting), fitting)


# ---- other formats ---------------------------------------------------------------------------


def _alternatives(question: _Question, config: EngineConfig) -> Iterator[Alternative]:
    """Yield the plans for all pairs of weight formats and KV formats."""
    on_cpu = question.device.kind == CPU
    in_eight = ("int8",) if _has_int8(question.device, config) else ()
    of_kv = ("auto", *in_eight, *(() if on_cpu else ("fp8",)))
    for quantization in _quantizations(question, config):
        for kv in of_kv[:1] if question.spec.is_encoder else of_kv:
            note = FP8_GPUS if kv == "fp8" else ""
            yield _alternative(question, config, quantization, kv, note)


def _quantizations(question: _Question, config: EngineConfig) -> list[str | None]:
    """Return the quantizations to compare; None is a GGUF file's own formats."""
    is_file = question.file is not None and question.device.kind == CPU
    in_dtype: list[str | None] = [None, "none"] if is_file else ["none"]
    if not _has_int8(question.device, config):
        return in_dtype
    in_float8 = [] if question.device.kind == CPU else ["fp8"]
    return [*in_dtype, *in_float8, "int8", "int4"]


def _alternative(
    question: _Question, config: EngineConfig, quantization: str | None, kv: str, note: str
) -> Alternative:
    requested = config.model.quantization
    if requested is None and None not in _quantizations(question, config):
        requested = "none"
    if (requested, config.cache.kv_cache_dtype) == (quantization, kv):
        note, other = "; ".join(each for each in ("as asked", note) if each), config
    else:
        same = quantization == requested
        group = config.model.quantization_group_size if same else None
        other = _replaced(
            config,
            quantization=quantization,
            quantization_group_size=group,
            quantized_head=config.model.quantized_head if same else "auto",
            kv_cache_dtype=kv,
        )
    name = "as in the file" if quantization is None else quantization
    name = config.model.dtype if quantization == "none" else name
    try:
        total = question.weights_bytes(other)
    except ConfigError:
        return Alternative(name, kv, 0, 0, 0, 0, "so many ranks cannot share these")
    return _row(question, other, (name, kv), total, note)


def _row(
    question: _Question,
    config: EngineConfig,
    names: tuple[str, str],
    weights_bytes: int,
    note: str,
) -> Alternative:
    weights, kv = names
    try:
        memory = question.plan(config, weights_bytes)
    except OutOfMemory:
        note = "; ".join(each for each in (note, "does not fit") if each)
        return Alternative(weights, kv, weights_bytes, 0, 0, 0, note)
    found = _requests_of(memory.max_model_len, config, question.own, memory)
    return Alternative(
        weights, kv, weights_bytes, memory.pool_bytes, memory.num_slots, found.at_once, note
    )


# ---- obstacles and advice --------------------------------------------------------------------


def _why_not(question: _Question, config: EngineConfig, weights_bytes: int) -> str:
    """Return a message with the missing size and settings with which the model would fit."""
    device, length = question.device, config.model.max_model_len
    workspace = workspace_of(config, question.own)
    lacking = _lacking(question, config, weights_bytes)
    graph_bytes = 0 if device.kind == CPU else estimated_graph_bytes(config, question.own)
    graphs = f", graphs ({graph_bytes / MIB:,.0f} MiB)" if graph_bytes else ""
    is_share = device.kind == CPU and config.cache.kv_cache_memory_bytes is None
    share = ", at most a quarter of that memory," if is_share else ""
    request = "any request" if length == AUTO_LENGTH else f"one request of {length:,} tokens"
    helping = _helping(question, _smaller(question, config, weights_bytes))
    if not helping and device.kind != CPU:
        helping = _helping(question, _quantised_on_gpu(config))
    advice = f"It would fit with {' or with '.join(helping)}."
    if not helping:
        advice = "No setting makes it fit: use a smaller model or a larger device."
    return (
        f"{question.name} does not fit {device.name} with {device.memory_bytes / MIB:,.0f} MiB."
        f" {lacking / MIB:,.0f} MiB are missing for weights ({weights_bytes / MIB:,.0f} MiB),"
        f" workspace ({workspace / MIB:,.0f} MiB){graphs} and a KV pool{share} that holds"
        f" {request}. {advice}"
    )


def _helping(question: _Question, settings: Iterator[tuple[str, EngineConfig]]) -> list[str]:
    """Return the settings with which the model fits, without supersets of a solution."""
    found: list[str] = []
    for words, other in settings:
        if not any(each in words for each in found) and _fits(question, other):
            found.append(words)
    return found


def _lacking(question: _Question, config: EngineConfig, weights_bytes: int) -> int:
    """Return the number of bytes that the pool lacks, at least 1."""
    left = question.budget(config, weights_bytes)
    if left >= 0 and config.cache.kv_cache_memory_bytes is not None:
        left = config.cache.kv_cache_memory_bytes
    return max(1, question.min_pool_bytes_of(config) - left)


def _fits(question: _Question, config: EngineConfig) -> bool:
    try:
        question.plan(config, question.weights_bytes(config))
    except (OutOfMemory, ConfigError):
        return False
    return True


def _smaller(
    question: _Question, config: EngineConfig, weights_bytes: int
) -> Iterator[tuple[str, EngineConfig]]:
    """Yield settings that need less memory, as flags, the mildest first."""
    auto = {"max_model_len": AUTO_LENGTH}
    yield "--max-model-len auto", _replaced(config, **auto)
    if question.device.kind != CPU:
        yield from _smaller_on_gpu(config)
        return
    needed = question.min_pool_bytes_of(config)
    left = question.device.memory_bytes - weights_bytes - workspace_of(config, question.own)
    if needed <= left:
        pool = {"kv_cache_memory_bytes": needed}
        yield f"--kv-cache-memory-bytes {needed}", _replaced(config, **pool)
    if not _has_int8(question.device, config):
        return
    yield "--kv-cache-dtype int8", _replaced(config, kv_cache_dtype="int8")
    sizes = {"quantization_group_size": None, "quantized_head": "auto"}
    for name in ("int8", "int4"):
        yield f"--quantization {name}", _replaced(config, quantization=name, **sizes)
    smallest = sizes | {"quantization": "int4", "kv_cache_dtype": "int8"}
    yield "--quantization int4 --kv-cache-dtype int8", _replaced(config, **smallest)
    words = "--quantization int4 --kv-cache-dtype int8 --max-model-len auto"
    yield words, _replaced(config, **smallest, **auto)


def _smaller_on_gpu(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    tight = max(TIGHT_UTILIZATION, config.cache.gpu_memory_utilization)
    share = {"gpu_memory_utilization": tight}
    fewer = {"max_num_batched_tokens": FEW_TOKENS}
    eager = dataclasses.replace(config, enforce_eager=True)
    yield "--enforce-eager", eager
    yield f"--gpu-memory-utilization {tight}", _replaced(config, **share)
    yield f"--max-num-batched-tokens {FEW_TOKENS}", _replaced(config, **fewer)
    words = f"--gpu-memory-utilization {tight} --max-num-batched-tokens {FEW_TOKENS}"
    yield words, _replaced(config, **share, **fewer)
    yield f"{words} --enforce-eager", _replaced(eager, **share, **fewer)
    all_of_it = share | fewer | {"max_model_len": AUTO_LENGTH}
    yield f"{words} --max-model-len auto", _replaced(config, **all_of_it)


def _quantised_on_gpu(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    sizes = {"quantization_group_size": None, "quantized_head": "auto"}
    for name in ("fp8", "int4"):
        quantised = _replaced(config, quantization=name, **sizes)
        yield f"--quantization {name}", quantised
        for words, other in _smaller_on_gpu(quantised):
            yield f"--quantization {name} {words}", other


def _replaced(config: EngineConfig, **settings: object) -> EngineConfig:
    """Return the config with other settings, given by flat names."""
    parts = {}
    for part in ("model", "cache", "scheduler"):
        owner = getattr(config, part)
        names = {item.name for item in dataclasses.fields(owner)} & settings.keys()
        parts[part] = dataclasses.replace(owner, **{name: settings[name] for name in names})
    return dataclasses.replace(config, **parts)


def _warnings(question: _Question, config: EngineConfig, weights_bytes: int) -> Iterator[str]:
    """Yield warnings about settings that the engine would reject or may not be able to use."""
    pool, left = config.cache.kv_cache_memory_bytes, question.budget(config, weights_bytes)
    if question.device.kind == CPU:
        workspace = workspace_of(config, question.own)
        left = question.device.memory_bytes - weights_bytes - workspace
        if config.cache.kv_cache_dtype == "int8" and not _has_int8(question.device, config):
            yield "keys and values in int8 need the C++ core and a dtype that it supports"
        if config.cache.kv_cache_dtype == "fp8":
            yield "keys and values in fp8 need a GPU; a CPU supports int8"
    if pool is not None and pool > max(0, left):
        sizes = f"{pool / MIB:,.0f} MiB, but only {max(0, left) / MIB:,.0f} MiB"
        yield f"kv_cache_memory_bytes is {sizes} are left for it"


def _differences(question: _Question, source: ModelSource) -> list[str]:
    """Return the differences between the weight files' headers and the config's tensors."""
    found, made = question.tensors.shapes, question.outline
    if not found:
        return [question.tensors.problem] if question.tensors.problem else []
    if question.spec.quantization is not None:
        return _first_difference(question, source)
    expected = {name: shape for part in made.parts for name, shape in part.tensors.items()}
    known = {own: shape for name, shape in found.items() for own in made.names_of(name)}
    known |= found
    problems = {
        "lack": [name for name in expected if name not in known],
        "have other shapes than the config requires:": [
            name for name, shape in expected.items() if known.get(name, ANY) not in (ANY, shape)
        ],
        "hold tensors that no layer uses:": [
            name
            for name in found
            if not (made.ignores(name) or any(own in expected for own in made.names_of(name)))
        ],
    }
    lines = [
        f"the weight files {fault} {listed(names)}" for fault, names in problems.items() if names
    ]
    return lines if lines or question.file is not None else _first_difference(question, source)


def _first_difference(question: _Question, source: ModelSource) -> list[str]:
    """Return the error with which loading would reject the weight files, if there is one."""
    try:
        check_files(weight_files(source.directory), question.spec, question.place)
    except ModelError as error:
        return [str(error)]
    return []


def _stored_tensors(
    spec: ModelSpec, config: EngineConfig, source: ModelSource, file: GGUFFile | None
) -> _StoredTensors:
    """Read names and shapes of the weight files' tensors.

    A GGUF file's shapes are not compared, because some are transposed."""
    if "dummy" in (source.load_format, config.model.load_format):
        return _StoredTensors()
    if file is not None:
        places = (p for p in file.tensors.values() if p.name not in OF_CONFIG)
        return _StoredTensors({name: ANY for p in places for name in our_names(p, spec)})
    if not has_weights(source.directory):
        problem = "only the config was checked: there are no weight files next to it"
        return _StoredTensors(problem=problem)
    try:
        return _StoredTensors(safetensors_shapes(weight_files(source.directory)))
    except ModelError as error:
        return _StoredTensors(problem=f"the weight files could not be checked: {error}")
