"""Division of a machine's memory among several models at the start.

    free = weights and workspace of the largest models that are loaded at once + KV pools
    each pool = one longest sequence + a part of the rest, in proportion to the model's weights,
                and no more than the model can use

So any models that may be loaded together fit. `kv_cache_memory_bytes`, if set, is the total of all
pools that exist at once. A pool size set for one model applies to that model alone.
"""

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence

import msgspec

from quire.base.errors import ConfigError, OutOfMemory
from quire.base.settings.config import EngineConfig
from quire.engine.wire.spawn import start_child
from quire.kv.sizing import MIB
from quire.runner.memory_plan import (
    GPU_CONTEXT_BYTES,
    GPU_RESERVE_BYTES,
    cpu_pool_budget,
    gpu_pool_budget,
)
from quire.serve.several.served import ServedModel

logger = logging.getLogger("quire")

BISECTIONS = 100
TOGETHER = "at most"


class ModelNeeds(msgspec.Struct, frozen=True):
    """Memory needs of one model, in bytes."""

    weights: int
    workspace: int
    one_sequence: int  # KV pool for the longest sequence; 0 if any size will do
    highest: int | None  # KV pool if the model ran alone; 0 for an encoder; None if unknown


class Needs(msgspec.Struct, frozen=True):
    """Memory needs of all models, and the device's memory."""

    models: list[ModelNeeds]  # needs in the models' order
    device: str  # cpu or cuda
    free: int  # free bytes of the device's memory
    total: int  # all bytes of the device's memory


def with_pools(
    models: Sequence[ServedModel], max_loaded: int | None, log_level: str
) -> list[ServedModel]:
    """Return the models with the sizes of their KV pools, and log the division. Raises OutOfMemory
    if the memory is too small, ConfigError if a model cannot be loaded at all."""
    needs = _measure_needs([model.engine for model in models], log_level)
    num_loaded = min(max_loaded or len(models), len(models))
    own = [model.own_pool_bytes for model in models]
    engines = [model.engine for model in models if model.own_pool_bytes is None]
    budget = _largest((each or 0 for each in own), num_loaded)
    if engines:
        budget = pool_budget(needs, num_loaded, engines[0])
    pools = split(needs, num_loaded, budget, own)
    names = [model.name for model in models]
    for line in described(names, needs, pools, num_loaded):
        logger.info("%s", line)
    return [_with_pool(model, pool) for model, pool in zip(models, pools, strict=True)]


def pool_budget(needs: Needs, num_loaded: int, engine: EngineConfig) -> int:
    """Return the maximum bytes of all pools that exist at once. engine: settings of any model
    without a pool size of its own; common settings are the same in each. Raises OutOfMemory."""
    weights = _largest((each.weights for each in needs.models), num_loaded)
    workspace = _largest((each.workspace for each in needs.models), num_loaded)
    if needs.device == "cuda":
        used = weights + num_loaded * GPU_CONTEXT_BYTES
        rest = workspace + (num_loaded - 1) * GPU_RESERVE_BYTES
        share = engine.cache.gpu_memory_utilization
        budget = gpu_pool_budget(needs.total, share, used, needs.free - used, rest)
    else:
        budget = cpu_pool_budget(needs.free, weights, workspace)
    if engine.cache.kv_cache_memory_bytes is not None:
        return engine.cache.kv_cache_memory_bytes
    if budget <= 0:
        raise OutOfMemory(
            f"the {num_loaded} largest models take {(weights + workspace) / MIB:,.0f} MiB for"
            f" weights and workspace, but {needs.free / MIB:,.0f} MiB are free. Lower"
            " max_loaded_models, or serve smaller models."
        )
    return budget


def split(needs: Needs, num_loaded: int, budget: int, own: Sequence[int | None]) -> list[int]:
    """Return the bytes of each pool. own: pool sizes set for single models. Raises OutOfMemory if
    the pools cannot hold one sequence of each model."""
    min_pools = [
        each.one_sequence if given is None else given
        for each, given in zip(needs.models, own, strict=True)
    ]
    rest = budget - _largest(min_pools, num_loaded)
    if rest < 0:
        raise OutOfMemory(
            f"the KV pools may use {budget / MIB:,.0f} MiB together, but one sequence of"
            f" max_model_len for each of {num_loaded} models needs {(budget - rest) / MIB:,.0f}"
            " MiB. Lower max_model_len or max_loaded_models, or raise kv_cache_memory_bytes."
        )
    factor, highest = 0.0, budget / max(1, min(each.weights for each in needs.models))
    for _ in range(BISECTIONS):
        middle = (factor + highest) / 2
        fits = _largest(_pools(needs, min_pools, own, middle), num_loaded) <= budget
        factor, highest = (middle, highest) if fits else (factor, middle)
    return _pools(needs, min_pools, own, factor)


def _pools(
    needs: Needs, min_pools: Sequence[int], own: Sequence[int | None], factor: float
) -> list[int]:
    """Return pools of the minimum size plus `factor` bytes per byte of weights, up to each model's
    maximum."""
    pools = []
    for each, first, given in zip(needs.models, min_pools, own, strict=True):
        pool = first + int(factor * max(1, each.weights))
        highest = pool if each.highest is None else max(each.highest, first)
        pools.append(first if given is not None else min(pool, highest))
    return pools


def described(
    names: Sequence[str], needs: Needs, pools: Sequence[int], num_loaded: int
) -> list[str]:
    """Return log lines on the division of the memory, with one line for each model."""
    width = max(map(len, (*names, TOGETHER)))
    at_once = "all at once" if num_loaded == len(names) else f"{num_loaded} of them at once"
    lines = [f"memory for {len(names)} models, {at_once}: {needs.free / MIB:,.0f} MiB are free"]
    for name, each, pool in zip(names, needs.models, pools, strict=True):
        lines.append(
            f"  {name:{width}}  weights {each.weights / MIB:,.0f} MiB, workspace"
            f" {each.workspace / MIB:,.0f} MiB, "
            + (f"KV pool {pool / MIB:,.0f} MiB" if pool else "no KV pool")
        )
    sums = (
        [each.weights for each in needs.models],
        [each.workspace for each in needs.models],
        pools,
    )
    weights, workspace, pool = (_largest(each, num_loaded) for each in sums)
    lines.append(
        f"  {TOGETHER:{width}}  weights {weights / MIB:,.0f} MiB, workspace"
        f" {workspace / MIB:,.0f} MiB, KV pools {pool / MIB:,.0f} MiB"
    )
    return lines


def _largest(values: Iterable[int], num: int) -> int:
    """Return the sum of the `num` largest values, which bounds the sum of any `num` values."""
    return sum(sorted(values, reverse=True)[:num])


def _with_pool(model: ServedModel, pool: int) -> ServedModel:
    cache = dataclasses.replace(model.engine.cache, kv_cache_memory_bytes=max(1, pool))
    return dataclasses.replace(model, engine=dataclasses.replace(model.engine, cache=cache))


def _measure_needs(engines: list[EngineConfig], log_level: str) -> Needs:
    """Return the models' needs, computed in a child process. Raises ConfigError if that fails; the
    child has then printed the error."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as answer:
        arguments = ["--out", str(writing)]
        try:
            module = "quire.serve.several.sizes"
            process = start_child(module, arguments, engines, (writing,), log_level)
        finally:
            os.close(writing)
        data = answer.read()
    if process.wait() != 0 or not data:
        raise ConfigError("the models cannot be served together; see the line above.")
    return msgspec.json.decode(data, type=Needs)
