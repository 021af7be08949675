"""Import of torch in half the time, in processes that run only quire.

Half of `import torch` (0.6 of 1.25 s) is one module of Python code, which defines what operators do
to tensors without memory. Tools that trace models need it (torch.compile, torch.export), and so do
transformers' classes here, but quire's own models do not. So its import is deferred: an import of a
tracing module imports it first, as torch itself would have done.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEFERRED_MODULE = "torch._meta_registrations"
NEED_IT = ("torch._decomp", "torch._dynamo", "torch._inductor", "torch._prims", "torch._refs")


_runs_only_quire = [False]  # whether this process runs only quire


def declare_own_process() -> None:
    """Declare that this process runs only quire."""
    _runs_only_quire[0] = True


def import_torch() -> None:
    """Import torch; in a process that runs only quire, without the module that only tracing needs.
    Does nothing if torch is already imported."""
    if "torch" in sys.modules or not _runs_only_quire[0]:
        return
    empty = _Empty()
    sys.meta_path.insert(0, empty)
    try:
        import torch
    finally:
        sys.meta_path.remove(empty)
        found = sys.modules.pop(DEFERRED_MODULE, None)
    if found is not None:
        vars(torch).pop(DEFERRED_MODULE.rpartition(".")[2], None)
        sys.meta_path.insert(0, _DeferredImporter())


def import_rest() -> None:
    """Import the module that `import_torch` deferred, if it did."""
    importlib.import_module(DEFERRED_MODULE)


def new_generator(seed: int) -> "torch.Generator":
    """Make a generator of random numbers. Its class needs the deferred module."""
    import_rest()
    import torch

    return torch.Generator().manual_seed(seed)


class _Empty(MetaPathFinder, Loader):
    """Finder that substitutes an empty module for `DEFERRED_MODULE`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == DEFERRED_MODULE else None

    def exec_module(self, module: ModuleType) -> None:
        pass


class _DeferredImporter(MetaPathFinder):
    """Finder that imports the deferred module before the first module that needs it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == DEFERRED_MODULE:
            sys.meta_path.remove(self)
        elif name in NEED_IT:
            import_rest()  # calls this method first, for LEFT_OUT
            if name in sys.modules:  # already imported: do not run it again
                module = sys.modules[name]
                module.__spec__ = ModuleSpec(name, _Loaded(module))
                return module.__spec__
        return None


class _Loaded(Loader):
    """Loader that returns an already imported module unchanged."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
