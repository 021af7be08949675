"""Memory of a loaded model that a trainer's orders change: weights are replaced, freed and loaded.

The files of the present weights are remembered, so that freed weights can be loaded again. Files
that have changed since are refused, since they hold other weights.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.base.errors import ConfigError, ModelError
from quire.engine.attachments.weight_updates import Swap
from quire.engine.executors.loaded import LoadedElsewhere, LoadedModel
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.source import ModelSource, load_format_of
from quire.ops.host.torch_import import import_torch
from quire.runner.warm.model import WarmModel

if TYPE_CHECKING:
    from quire.runner.setup.built import BuiltRunner


class ModelMemory:
    """Weights and KV blocks of a model in this process (`SleepMemory`). A model of ranks is
    refused with ConfigError."""

    def __init__(self, built: LoadedModel, source: ModelSource) -> None:
        self._built, self._source = built, source
        self._path: Path = source.directory  # of the present weights
        self._files = [] if isinstance(built, LoadedElsewhere) else self._identity(self._path)

    def stage(self, path: Path) -> Swap:
        """Load new weights of a path and return the swap. Raises as `stage_weights` does."""
        return self._staged(path, lambda whole: _setup().stage_weights(whole, path))

    def stage_again(self) -> Swap:
        """Load the present weights from their files and return the swap. Raises ModelError if the
        files are gone or have changed, and as `stage_weights` does."""
        if not self._path.exists() or self._identity(self._path) != self._files:
            raise ModelError(
                f"the weights were freed, and their files are not in {self._path} any more;"
                " send the weights with update_weights, then wake the engine."
            )
        form = self._load_format(self._path)
        return self._staged(self._path, lambda whole: _setup().stage_again(whole, self._path, form))

    @property
    def has_weights(self) -> bool:
        """See SleepMemory. The weights of a start without torch stay mapped from their file."""
        whole = self._whole
        return whole is None or not isinstance(whole.runner.model, _setup().FreedModel)

    def why_not(self, level: int) -> str | None:
        """See SleepMemory."""
        if isinstance(self._built, LoadedElsewhere):
            return "other processes hold the model; use one process (no -tp, no -pp)"
        if self._built.device_type != "cpu":
            return "recorded steps on a GPU hold addresses of its memory; restart the engine"
        whole = self._whole
        return None if level == 1 or whole is None else _setup().why_fixed(whole)

    def free(self, level: int) -> None:
        """See SleepMemory. Host memory that stores read and write is not freed."""
        has_stores = bool(self._built.config.cache.stores)
        if isinstance(self._built, WarmModel):
            self._built.take_over()
            self._built.free_pages(weights=level == 2)
        whole = self._whole
        if whole is None:
            return
        if (blocks := whole.runner.backend.host_blocks) is not None:
            blocks.free(mirrors=not has_stores)
        if level == 2:
            _setup().free_weights(whole)
        gc.collect()  # a model has cycles

    @property
    def _whole(self) -> "BuiltRunner | None":
        built = self._built
        return built.whole if isinstance(built, WarmModel) else cast("BuiltRunner", built)

    def _staged(self, path: Path, load: "Callable[[BuiltRunner], Any]") -> Swap:
        built = self._built
        if isinstance(built, LoadedElsewhere):
            raise ConfigError("the weights of ranks cannot be replaced; use one process.")
        import_torch()
        whole = built.load_whole() if isinstance(built, WarmModel) else cast("BuiltRunner", built)
        model, files = load(whole), self._identity(path)

        def swap() -> None:
            if isinstance(built, WarmModel):
                built.take_over()
            whole.runner.model = model
            self._path, self._files = path, files

        return swap

    def _identity(self, path: Path) -> list[Any]:
        """Identify the files of weights; empty for random numbers."""
        if self._load_format(path) == "dummy":
            return []
        facts = [(each.name, each.stat()) for each in checkpoint_files(path)]
        return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in facts]

    def _load_format(self, path: Path) -> str:
        is_first = path == self._source.directory
        return load_format_of(self._built.config, self._source) if is_first else "auto"


def _setup() -> Any:
    """Return the module that loads weights; it imports torch."""
    from quire.runner.setup import new_weights

    return new_weights
