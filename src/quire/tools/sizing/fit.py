"""Compute whether a model fits a device: weights, KV pool and requests, without loading anything.

The plan is the engine's own (runner/memory_plan.py, kv/sizing.py, ops/weights/formats.py). It uses
the config and the headers of the weight files; no weight is read. A GPU's workspace, which the
engine measures, is estimated from the model's shape.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from quire.base.errors import ModelError, OutOfMemory
from quire.base.settings.config import EngineConfig
from quire.base.settings.speculation import parse_speculation
from quire.kv.sizing import MIB
from quire.models.checkpoint.files import listed, weight_files
from quire.models.checkpoint.formats import weight_formats
from quire.models.checkpoint.rank_place import RankPlace
from quire.models.checkpoint.source import CONFIG_ONLY, ModelSource
from quire.models.draft_model import with_drafter
from quire.models.load.loading import check_files
from quire.models.outline import FormatBytes
from quire.models.registry import model_spec
from quire.ops.collective import FirstOf
from quire.runner.derive import derive_config
from quire.runner.memory_plan import (
    MemoryPlan,
    adapter_bytes,
    block_bytes_of,
    encoder_cache_bytes,
    encoding_bytes,
    largest_item,
    num_adapters,
    workspace_of,
)
from quire.runner.stage import check_stages
from quire.spec.cache_group import STATE
from quire.spec.model_spec import ModelSpec
from quire.spec.pooling_spec import with_pooling
from quire.tools.devices import CPU, Device
from quire.tools.sizing.advice import why_not
from quire.tools.sizing.alternatives import (
    Alternative,
    Requests,
    alternatives,
    gguf_files,
    requests_of,
)
from quire.tools.sizing.question import ANY, Question, has_int8, make_question, replaced

LENGTHS = (512, 2048, 8192)


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
    gguf_files: tuple[Alternative, ...]  # the model as a GGUF file
    warnings: tuple[str, ...]
    largest_item: int = 0  # tokens of the largest media item
    encoding_bytes: int = 0  # part of the workspace: the vision tower's memory for that item
    encoder_cache_bytes: int = 0  # part of the workspace: slots
    adapter_bytes: int = 0  # part of the workspace: adapters in the device's memory
    num_adapters: int = 0  # their maximum number


class DoesNotFit(OutOfMemory):
    """The model does not fit as requested. formats: what fits with other formats."""

    def __init__(self, message: str, spec: ModelSpec, formats: tuple[Alternative, ...]) -> None:
        super().__init__(message)
        self.spec, self.formats = spec, formats


def fit(config: EngineConfig, source: ModelSource, device: Device) -> Fit:
    """Return the plan of a model on a device. The config's own device is ignored.

    With pipeline stages, the plan is of the stage with the smallest number of blocks. Raises
    ModelError and ConfigError as the engine would. Raises DoesNotFit if the model does not fit; the
    message holds the missing size and settings that help.
    """
    spec = model_spec(
        source.directory, config.model.model_impl, is_compiled=config.model.torch_compile
    )
    spec = with_pooling(spec, source.directory, config.model)
    speculation = parse_speculation(config.speculative_config)
    spec, draft_source = with_drafter(spec, speculation, source, CONFIG_ONLY)
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
    question = make_question(config, source, spec, device, place)
    own = question.own
    if draft_source is not None and spec.drafter is not None:
        drafter = make_question(config, draft_source, spec.drafter, device, place)
        question = dataclasses.replace(question, drafter=drafter)
    weights = question.weights(config)
    total = sum(each.num_bytes for each in weights)
    try:
        memory = question.plan(config, total)
    except OutOfMemory as error:
        formats = (*alternatives(question, config), *gguf_files(question, config))
        raise DoesNotFit(why_not(question, config, total), spec, formats) from error
    config = replaced(config, max_model_len=memory.max_model_len)
    return Fit(
        model=source.name,
        spec=spec,
        device=device,
        config=config,
        weights=tuple(weights),
        memory=memory,
        groups=_groups(config, own, memory),
        requests=_requests(config, own, memory),
        alternatives=tuple(alternatives(question, config)),
        gguf_files=tuple(gguf_files(question, config)),
        warnings=(*_warnings(question, config, total), *_differences(question, source)),
        largest_item=_largest_item(config, own),
        encoding_bytes=encoding_bytes(config, own),
        encoder_cache_bytes=encoder_cache_bytes(config, own),
        adapter_bytes=adapter_bytes(config, own),
        num_adapters=num_adapters(config),
    )


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
    return tuple(requests_of(length, config, spec, memory) for length in lengths)


def _warnings(question: Question, config: EngineConfig, weights_bytes: int) -> Iterator[str]:
    """Yield warnings about settings that the engine would reject or may not be able to use."""
    pool, left = config.cache.kv_cache_memory_bytes, question.budget(config, weights_bytes)
    if question.device.kind == CPU:
        workspace = workspace_of(config, question.own)
        left = question.device.memory_bytes - weights_bytes - workspace
        if config.cache.kv_cache_dtype == "int8" and not has_int8(question.device, config):
            yield "keys and values in int8 need the C++ core and a dtype that it supports"
        if config.cache.kv_cache_dtype == "fp8":
            yield "keys and values in fp8 need a GPU; a CPU supports int8"
    if pool is not None and pool > max(0, left):
        sizes = f"{pool / MIB:,.0f} MiB, but only {max(0, left) / MIB:,.0f} MiB"
        yield f"kv_cache_memory_bytes is {sizes} are left for it"


def _differences(question: Question, source: ModelSource) -> list[str]:
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


def _first_difference(question: Question, source: ModelSource) -> list[str]:
    """Return the error with which loading would reject the weight files, if there is one."""
    try:
        check_files(weight_files(source.directory), question.spec, question.place)
    except ModelError as error:
        return [str(error)]
    return []
