"""Compare what fits with other formats of the weights and of the KV cache.

Each row says how long one request may be, and how many requests of a usual length fit at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quire.base.errors import ConfigError, OutOfMemory
from quire.base.settings.config import AUTO_LENGTH, EngineConfig
from quire.kv.sizing import sequences_that_fit
from quire.runner.memory_plan import MemoryPlan
from quire.spec.gguf.container import KINDS
from quire.spec.gguf.families import FAMILIES
from quire.spec.model_spec import ModelSpec
from quire.tools.devices import CPU
from quire.tools.sizing.question import Question, has_int8, replaced

FP8_GPUS = "GPUs from 8.9 on"
USUAL_LENGTH = 4096  # tokens of a request, prompt and answer together
GGUF_KINDS = ("Q8_0", "Q6_K", "Q4_K", "IQ4_XS", "Q2_K")  # of files to compare, largest first


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
    longest: int = 0  # tokens of the longest request that fits; 0 if none does
    usual: int = 0  # requests of `usual_length` that fit at once, within max_num_seqs


def usual_length(spec: ModelSpec) -> int:
    """Return the tokens of a usual request, at most the model's context."""
    return min(USUAL_LENGTH, spec.max_position)


def alternatives(question: Question, config: EngineConfig) -> Iterator[Alternative]:
    """Yield the plans for all pairs of weight formats and KV formats."""
    on_cpu = question.device.kind == CPU
    in_eight = ("int8",) if has_int8(question.device, config) else ()
    of_kv = ("auto", *in_eight, *(() if on_cpu else ("fp8",)))
    for quantization in _quantizations(question, config):
        for kv in of_kv[:1] if question.spec.is_encoder else of_kv:
            note = FP8_GPUS if kv == "fp8" else ""
            yield _alternative(question, config, quantization, kv, note)


def gguf_files(question: Question, config: EngineConfig) -> Iterator[Alternative]:
    """Yield the plans for GGUF files of this model, if a CPU multiplies their formats."""
    is_known = any(each.model_type == question.spec.model_type for each in FAMILIES.values())
    if not is_known or question.device.kind != CPU or not has_int8(question.device, config):
        return
    as_stored = replaced(config, quantization=None)
    for kind in (each for name in GGUF_KINDS for each in KINDS.values() if each.name == name):
        num_bytes = question.gguf_bytes(as_stored, kind)
        yield _row(
            question, as_stored, (f"GGUF {kind.name}", config.cache.kv_cache_dtype), num_bytes, ""
        )


def _quantizations(question: Question, config: EngineConfig) -> list[str | None]:
    """Return the quantizations to compare; None is a GGUF file's own formats."""
    is_file = question.file is not None and question.device.kind == CPU
    in_dtype: list[str | None] = [None, "none"] if is_file else ["none"]
    if not has_int8(question.device, config):
        return in_dtype
    in_float8 = [] if question.device.kind == CPU else ["fp8"]
    return [*in_dtype, *in_float8, "int8", "int4"]


def _alternative(
    question: Question, config: EngineConfig, quantization: str | None, kv: str, note: str
) -> Alternative:
    requested = config.model.quantization
    if requested is None and None not in _quantizations(question, config):
        requested = "none"
    if (requested, config.cache.kv_cache_dtype) == (quantization, kv):
        note, other = _joined("as asked", note), config
    else:
        same = quantization == requested
        group = config.model.quantization_group_size if same else None
        other = replaced(
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
    question: Question,
    config: EngineConfig,
    names: tuple[str, str],
    weights_bytes: int,
    note: str,
) -> Alternative:
    weights, kv = names
    found = Alternative(weights, kv, weights_bytes, 0, 0, 0, note)
    try:
        longest = question.plan(replaced(config, max_model_len=AUTO_LENGTH), weights_bytes)
    except OutOfMemory:
        return replace(found, note=_joined(note, "does not fit"))
    length = usual_length(question.spec)
    usual = 0
    if length <= longest.max_model_len:
        usual = requests_of(length, config, question.own, longest).at_once
    found = replace(found, longest=longest.max_model_len, usual=usual)
    try:
        memory = question.plan(config, weights_bytes)
    except OutOfMemory:
        return replace(found, note=_joined(note, "does not fit"))
    requests = requests_of(memory.max_model_len, config, question.own, memory)
    return replace(
        found,
        pool_bytes=memory.pool_bytes,
        num_slots=memory.num_slots,
        at_once=requests.at_once,
    )


def _joined(*notes: str) -> str:
    return "; ".join(each for each in notes if each)


def requests_of(length: int, config: EngineConfig, spec: ModelSpec, memory: MemoryPlan) -> Requests:
    rows = config.scheduler.max_num_seqs or 0
    fitting = sequences_that_fit(spec.cache_groups, memory.num_blocks, memory.block_size, length)
    return Requests(length, min(rows, fitting), fitting)
