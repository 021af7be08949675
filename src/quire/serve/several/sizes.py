"""Memory needs of models, computed without loading them: python -m quire.serve.several.sizes.

The engines' configurations arrive as JSON on standard input. The needs are written as JSON to the
descriptor `--out`. This is a process of its own because it creates layers without memory. That
requires torch, which the supervisor does not import.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec

from quire.base.errors import OutOfMemory, QuireError
from quire.base.settings.config import AUTO_LENGTH, EngineConfig
from quire.engine.wire.child import NO_START, begin_child
from quire.engine.wire.logs import print_error
from quire.kv.sizing import MIB, size_pools
from quire.models.checkpoint.source import resolve_source
from quire.models.registry import model_spec
from quire.runner.memory_plan import block_bytes_of, workspace_of
from quire.runner.setup.preview import free_and_total_bytes, preview_runner
from quire.serve.several.shares import ModelNeeds, Needs
from quire.spec.model_spec import ModelSpec
from quire.spec.pooling_spec import with_pooling

PRECISION = 1.05  # maximum ratio of one_sequence to the true minimum


def main() -> int:
    """Compute the needs, write them and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=int, required=True, help="descriptor for the answer")
    parser.add_argument("--log-level", default="info")
    options = parser.parse_args()
    begin_child(options.log_level)
    configs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[EngineConfig])
    try:
        needs = needs_of(configs)
    except QuireError as error:
        print_error(error)
        return NO_START
    with os.fdopen(options.out, "wb") as file:
        file.write(msgspec.json.encode(needs))
    return 0


def needs_of(configs: list[EngineConfig]) -> Needs:
    """Return the needs of models. Raises the error of a model that cannot be loaded alone."""
    models, device = [], ""
    for config in configs:
        try:
            needs, device = _needs(config)
        except QuireError as error:
            raise type(error)(f"model {config.model.model}: {error}") from error
        models.append(needs)
    return Needs(models, device, *free_and_total_bytes(device))


def _needs(config: EngineConfig) -> tuple[ModelNeeds, str]:
    source = resolve_source(config.model, progress=False)
    found = preview_runner(config, source)
    model = found.config.model
    spec = model_spec(source.directory, model.model_impl, is_compiled=model.torch_compile)
    spec = with_pooling(spec, source.directory, model)
    own = spec.of_ranks(found.config.parallel.tensor_parallel_size)
    own = replace(own, encoder=found.encoder)
    workspace = workspace_of(found.config, own)
    if own.is_encoder:  # an encoder computes a prompt in one step
        return ModelNeeds(found.weights_bytes, workspace, 0, 0), found.config.device
    max_pool = found.memory.pool_bytes if found.memory else None
    needs = ModelNeeds(found.weights_bytes, workspace, _one_sequence(found.config, own), max_pool)
    return needs, found.config.device


def _one_sequence(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the approximate size of a pool that holds the longest sequence."""
    length, scheduler = config.model.max_model_len, config.scheduler
    assert length and scheduler.max_num_seqs and scheduler.max_num_batched_tokens
    if length == AUTO_LENGTH:
        return 0
    sizes = block_bytes_of(config, spec)
    rest = (config.cache.block_size, length, scheduler.max_num_seqs)

    def fits(num_bytes: int) -> bool:
        try:
            size_pools(
                spec.cache_groups, sizes, num_bytes, *rest, scheduler.max_num_batched_tokens or 1
            )
        except OutOfMemory:
            return False
        return True

    return min_bytes(fits)


def min_bytes(fits: Callable[[int], bool]) -> int:
    """Return approximately the smallest number of bytes that fits, rounded up."""
    high = MIB // 16
    while not fits(high):
        high *= 2
    low = high // 2
    while high > low * PRECISION:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


if __name__ == "__main__":
    sys.exit(main())
