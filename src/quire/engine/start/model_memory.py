"""Memory of a loaded model that a trainer's orders change: weights are replaced, freed and loaded.

The files of the present weights are remembered. Freed weights are loaded again from them, and
partial updates are added to them as a patch. Files that have changed since are refused, since they
hold other weights.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from quire.base.errors import ConfigError, ModelError
from quire.engine.attachments.weight_updates import Swap
from quire.engine.executors.loaded import LoadedElsewhere, LoadedModel
from quire.engine.start.numerics import weights_digest
from quire.models.checkpoint.files import checkpoint_files
from quire.models.checkpoint.source import ModelSource, load_format_of
from quire.models.load.weight_files import folder_for
from quire.ops.host.torch_import import import_torch
from quire.runner.warm.model import WarmModel
from quire.spec.gguf.container import is_gguf

if TYPE_CHECKING:
    from quire.runner.setup.built import BuiltRunner

PATCH, DUMMY = "patch.safetensors", "dummy"


class ModelMemory:
    """Weights and KV blocks of a model in this process (`SleepMemory`). A model of ranks is
    refused with ConfigError.

    weights: digest of the present weights (`weights_digest`)."""

    def __init__(self, built: LoadedModel, source: ModelSource) -> None:
        self._built = built
        # Of the present weights: path, load format, patch (deleted with its last reference), files.
        self._path, self._form = source.directory, load_format_of(built.config, source)
        self._patch: TemporaryDirectory[str] | None = None
        is_here = not isinstance(built, LoadedElsewhere)
        self._files = _identity(self._path, self._form) if is_here else []
        self.weights = self._digest(self._path, self._form)

    def stage(self, path: Path, is_partial: bool = False) -> Swap:
        """Load new weights of a path and return the swap. is_partial: the path has some of the
        tensors, or deltas. Raises as `stage_weights` and `write_patch` do, and ModelError for a
        partial update of weights that have no files."""
        if not is_partial:
            return self._staged(path, lambda whole: _setup().stage_weights(whole, path))
        if not self._has_files or is_gguf(self._path) or self._form == DUMMY:
            raise ModelError(
                f"a partial update needs the safetensors files of the present weights, and"
                f" {self._path} does not have these; update from a folder, or send all tensors."
            )
        update = checkpoint_files(path)
        files = checkpoint_files(self._path)
        num_bytes = sum(each.stat().st_size for each in [*files, *update])  # at most
        folder = TemporaryDirectory(prefix="quire-patch-", dir=folder_for(num_bytes))
        patch = Path(folder.name) / PATCH
        import_torch()
        from quire.models.load.patches import write_patch  # imports torch

        write_patch(files, self._patch_file, update, patch)
        return self._staged_again(folder, patch)

    def stage_again(self) -> Swap:
        """Load the present weights from their files and return the swap. Raises ModelError if the
        files have changed or do not exist, and as `stage_weights` does."""
        if not self._has_files:
            raise ModelError(
                f"the weights were freed, and their files are not in {self._path} any more;"
                " send the weights with update_weights, then wake the engine."
            )
        return self._staged_again(self._patch, self._patch_file)

    def _staged_again(self, folder: "TemporaryDirectory[str] | None", patch: Path | None) -> Swap:
        path, form = self._path, self._form
        return self._staged(
            path, lambda whole: _setup().stage_again(whole, path, form, patch), folder, form
        )

    @property
    def _has_files(self) -> bool:
        """Whether the files of the present weights, but for a patch, are as they were."""
        return self._path.exists() and _identity(self._path, self._form) == self._files

    @property
    def _patch_file(self) -> Path | None:
        return None if self._patch is None else Path(self._patch.name) / PATCH

    def _digest(self, path: Path, form: str, patch: Path | None = None) -> str:
        return weights_digest(path, form, self._built.config.model.seed, patch)

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
            if level == 2:
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

    def _staged(
        self,
        path: Path,
        load: "Callable[[BuiltRunner], Any]",
        patch: "TemporaryDirectory[str] | None" = None,
        form: str = "auto",
    ) -> Swap:
        built = self._built
        if isinstance(built, LoadedElsewhere):
            raise ConfigError("the weights of ranks cannot be replaced; use one process.")
        import_torch()
        whole = built.load_whole() if isinstance(built, WarmModel) else cast("BuiltRunner", built)
        model, files = load(whole), _identity(path, form)
        digest = self._digest(path, form, None if patch is None else Path(patch.name) / PATCH)

        def swap() -> None:
            if isinstance(built, WarmModel):
                built.take_over()
            whole.runner.model = model
            self._path, self._form, self._patch, self._files = path, form, patch, files
            self.weights = digest

        return swap


def _identity(path: Path, form: str) -> list[Any]:
    """Identify the files of weights; empty for random numbers. form: load format."""
    if form == DUMMY:
        return []
    facts = [(each.name, each.stat()) for each in checkpoint_files(path)]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in facts]


def _setup() -> Any:
    """Return the module that loads weights; it imports torch."""
    from quire.runner.setup import new_weights

    return new_weights
