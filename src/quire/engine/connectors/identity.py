"""Fingerprint of a cache: a digest of everything that can change a key or a value.

Blocks outlive an engine in a directory or a store, where another engine finds them by the digests
of their tokens. The fingerprint is the root of these digest chains. If it omits a property, an
engine may load another model's keys and values. If it covers too much, there is only a miss.
"""

from quire.base.settings.config import EngineConfig
from quire.base.settings.parallel import ParallelConfig
from quire.engine.executors.loaded import LoadedModel
from quire.kv.digest import cache_fingerprint
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.formats import weight_formats
from quire.models.checkpoint.source import ModelSource, load_format_of
from quire.models.load.cache_files import file_identity
from quire.ops.host.native_types import BLOCK_LAYOUT
from quire.ops.weights.formats import ATTENTION, FORMATS, chosen_variants
from quire.spec.cache_group import GPU_INT8_LAYOUT


def fingerprint_of(built: LoadedModel, source: ModelSource) -> bytes:
    """Return the fingerprint of a model's cache. Raises OSError if weights cannot be read."""
    config, cache = built.config, built.config.cache
    return cache_fingerprint(
        source.name,
        config.model.revision or "",
        weights_identity(config, source),
        built.spec.identity,
        repr(weight_formats(config.model)),
        repr(sorted(built.kv_scales.items())),
        str(built.dtype),
        built.device_type,
        built.backend_name,
        str(cache.block_size),
        cache.kv_cache_dtype,
        "deterministic" if config.deterministic else "",
        _kernels(built),
        *_of_drafter(built),
        *_of_hash(cache.prefix_caching_hash_algo),
        *_of_ranks(config.parallel),
    )


def fingerprint_of_part(built: LoadedModel, source: ModelSource, rank: int) -> bytes:
    """Return the fingerprint of one rank's parts of blocks. A single rank has whole blocks."""
    whole = fingerprint_of(built, source)
    if built.config.parallel.num_ranks == 1:
        return whole
    return cache_fingerprint(whole.hex(), f"part of rank {rank}")


def _of_ranks(parallel: ParallelConfig) -> tuple[str, ...]:
    """Describe the division of blocks among ranks. A single rank has none."""
    if parallel.num_ranks == 1:
        return ()
    sizes = (
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.decode_context_parallel_size,
    )
    return (f"divided among {sizes}",)


def _of_hash(name: str) -> tuple[str, ...]:
    """Name the block hash unless it is the default, so that older versions' caches stay valid."""
    return () if name == "sha256" else (f"blocks hashed with {name}",)


def _of_drafter(built: LoadedModel) -> tuple[str, ...]:
    """Identify the draft model, if any, whose keys and values are next to the served model's."""
    source, spec = built.draft_source, built.spec.drafter
    if source is None or spec is None:
        return ()
    return source.name, weights_identity(built.config, source), spec.identity


def _kernels(built: LoadedModel) -> str:
    """Name the block layout (on a GPU only for int8) and the instruction sets that round its
    values. Kernels of integers are omitted: they give the same bits with all instruction sets."""
    if built.device_type != "cpu":
        return repr(GPU_INT8_LAYOUT) if built.config.cache.kv_cache_dtype == "int8" else ""
    dtype = str(built.dtype).removeprefix("torch.")
    chosen = chosen_variants(each for each in (dtype, ATTENTION) if each in FORMATS)
    return repr((BLOCK_LAYOUT, chosen))


def weights_identity(config: EngineConfig, source: ModelSource) -> str:
    """Identify the weights by their files or seed; empty if no blocks outlive the engine."""
    if not config.cache.stores:
        return ""
    if load_format_of(config, source) == "dummy":
        return f"random numbers by name of seed {config.model.seed}"
    return repr([file_identity(file) for file in checkpoint_files(source.directory)])
