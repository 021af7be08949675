"""Say why a model does not fit, and find settings with which it would."""

import dataclasses
from collections.abc import Iterator

from quire.base.errors import ConfigError, OutOfMemory
from quire.base.settings.config import AUTO_LENGTH, EngineConfig
from quire.kv.sizing import MIB
from quire.runner.memory_plan import (
    estimated_graph_bytes,
    workspace_of,
)
from quire.tools.devices import CPU
from quire.tools.sizing.question import Question, has_int8, replaced

TIGHT_UTILIZATION = 0.97
FEW_TOKENS = 2048


def why_not(question: Question, config: EngineConfig, weights_bytes: int) -> str:
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


def _helping(question: Question, settings: Iterator[tuple[str, EngineConfig]]) -> list[str]:
    """Return the settings with which the model fits, without supersets of a solution."""
    found: list[str] = []
    for words, other in settings:
        if not any(each in words for each in found) and _fits(question, other):
            found.append(words)
    return found


def _lacking(question: Question, config: EngineConfig, weights_bytes: int) -> int:
    """Return the number of bytes that the pool lacks, at least 1."""
    left = question.budget(config, weights_bytes)
    if left >= 0 and config.cache.kv_cache_memory_bytes is not None:
        left = config.cache.kv_cache_memory_bytes
    return max(1, question.min_pool_bytes_of(config) - left)


def _fits(question: Question, config: EngineConfig) -> bool:
    try:
        question.plan(config, question.weights_bytes(config))
    except (OutOfMemory, ConfigError):
        return False
    return True


def _smaller(
    question: Question, config: EngineConfig, weights_bytes: int
) -> Iterator[tuple[str, EngineConfig]]:
    """Yield settings that need less memory, as flags, the mildest first."""
    auto = {"max_model_len": AUTO_LENGTH}
    yield "--max-model-len auto", replaced(config, **auto)
    if question.device.kind != CPU:
        yield from _smaller_on_gpu(config)
        return
    needed = question.min_pool_bytes_of(config)
    left = question.device.memory_bytes - weights_bytes - workspace_of(config, question.own)
    if needed <= left:
        pool = {"kv_cache_memory_bytes": needed}
        yield f"--kv-cache-memory-bytes {needed}", replaced(config, **pool)
    if not has_int8(question.device, config):
        return
    yield "--kv-cache-dtype int8", replaced(config, kv_cache_dtype="int8")
    sizes = {"quantization_group_size": None, "quantized_head": "auto"}
    for name in ("int8", "int4"):
        yield f"--quantization {name}", replaced(config, quantization=name, **sizes)
    smallest = sizes | {"quantization": "int4", "kv_cache_dtype": "int8"}
    yield "--quantization int4 --kv-cache-dtype int8", replaced(config, **smallest)
    words = "--quantization int4 --kv-cache-dtype int8 --max-model-len auto"
    yield words, replaced(config, **smallest, **auto)


def _smaller_on_gpu(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    tight = max(TIGHT_UTILIZATION, config.cache.gpu_memory_utilization)
    share = {"gpu_memory_utilization": tight}
    fewer = {"max_num_batched_tokens": FEW_TOKENS}
    eager = dataclasses.replace(config, enforce_eager=True)
    yield "--enforce-eager", eager
    yield f"--gpu-memory-utilization {tight}", replaced(config, **share)
    yield f"--max-num-batched-tokens {FEW_TOKENS}", replaced(config, **fewer)
    words = f"--gpu-memory-utilization {tight} --max-num-batched-tokens {FEW_TOKENS}"
    yield words, replaced(config, **share, **fewer)
    yield f"{words} --enforce-eager", replaced(eager, **share, **fewer)
    all_of_it = share | fewer | {"max_model_len": AUTO_LENGTH}
    yield f"{words} --max-model-len auto", replaced(config, **all_of_it)


def _quantised_on_gpu(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    sizes = {"quantization_group_size": None, "quantized_head": "auto"}
    for name in ("fp8", "int4"):
        quantised = replaced(config, quantization=name, **sizes)
        yield f"--quantization {name}", quantised
        for words, other in _smaller_on_gpu(quantised):
            yield f"--quantization {name} {words}", other
