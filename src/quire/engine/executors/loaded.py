"""Properties of a loaded model that an engine reads, whether its own process or ranks loaded it."""

from dataclasses import dataclass
from typing import Protocol

from quire.base.settings.config import EngineConfig
from quire.models.checkpoint.source import ModelSource
from quire.runner.memory_plan import MemoryPlan
from quire.spec.model_spec import ModelSpec


class LoadedModel(Protocol):
    """Loaded model. config: configuration with all derived values. spec: of one rank's part.
    dtype: `str(dtype)` is the type's name. is_async: whether the device works alongside the host.
    drafter_reads_target: whether the draft model reads the served model's hidden states; None
    without a draft model. num_threads: CPU threads of the model's process."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def memory(self) -> MemoryPlan: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device_type(self) -> str: ...
    @property
    def backend_name(self) -> str: ...
    @property
    def copy_bytes_per_s(self) -> float: ...
    @property
    def host_limits(self) -> tuple[int, ...] | None: ...
    @property
    def kv_scales(self) -> dict[int, tuple[float, float]]: ...
    @property
    def draft_source(self) -> ModelSource | None: ...
    @property
    def is_async(self) -> bool: ...
    @property
    def drafter_reads_target(self) -> bool | None: ...
    @property
    def num_threads(self) -> int: ...


@dataclass(frozen=True)
class LoadedElsewhere:
    """`LoadedModel` as data that a rank sends to its core."""

    config: EngineConfig
    spec: ModelSpec
    memory: MemoryPlan
    dtype: str
    device_type: str
    backend_name: str
    copy_bytes_per_s: float
    host_limits: tuple[int, ...] | None
    kv_scales: dict[int, tuple[float, float]]
    draft_source: ModelSource | None
    is_async: bool
    drafter_reads_target: bool | None
    num_threads: int

    @classmethod
    def of(cls, model: LoadedModel) -> "LoadedElsewhere":
        return cls(
            model.config,
            model.spec,
            model.memory,
            str(model.dtype),
            model.device_type,
            model.backend_name,
            model.copy_bytes_per_s,
            model.host_limits,
            model.kv_scales,
            model.draft_source,
            model.is_async,
            model.drafter_reads_target,
            model.num_threads,
        )
