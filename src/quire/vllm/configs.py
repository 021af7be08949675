"""vLLM's classes of configurations.

A class that vLLM's settings take as JSON is a dictionary here. `VllmConfig` shows an engine's
configuration under vLLM's names.
"""

import enum
from dataclasses import dataclass
from typing import Any

from quire.base.settings.cache_config import CacheConfig
from quire.base.settings.config import EngineConfig, ModelConfig, SchedulerConfig
from quire.base.settings.parallel import ParallelConfig


@dataclass(frozen=True)
class VllmConfig:
    """Configuration of an engine, which logits processors receive."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    speculative_config: Any = None

    @classmethod
    def of(cls, config: EngineConfig) -> "VllmConfig":
        return cls(
            config.model,
            config.cache,
            config.scheduler,
            config.parallel,
            config.speculative_config,
        )


class _JsonConfig(dict[str, Any]):
    """A setting of several fields; the engine checks them."""


class KVTransferConfig(_JsonConfig):
    """`kv_transfer_config` of an engine."""


class KVEventsConfig(_JsonConfig):
    """`kv_events_config` of an engine."""


class CompilationConfig(_JsonConfig):
    """`compilation_config` of an engine, which quire ignores: its kernels need no compilation."""


class PoolerConfig(_JsonConfig):
    """`pooler_config` of an engine."""


class SpeculativeConfig(_JsonConfig):
    """`speculative_config` of an engine."""


class StructuredOutputsConfig(_JsonConfig):
    """`structured_outputs_config` of an engine, which quire ignores."""


class AttentionConfig(_JsonConfig):
    """`attention_config` of an engine."""


class ProfilerConfig(_JsonConfig):
    """`profiler_config` of an engine."""


class CompilationMode(enum.IntEnum):
    """vLLM's modes of compilation, which change nothing here."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(enum.Enum):
    """vLLM's modes of CUDA graphs, which change nothing here."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3
    FULL_AND_PIECEWISE = 4
