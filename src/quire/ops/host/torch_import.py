"""Importing torch in half the time, in processes that are quire's alone.

Half of `import torch` (0.6 of 1.25 s) is one module of Python code, which tells what operators do
to tensors without memory. What traces models needs it (torch.compile, torch.export), and so do
transformers' classes here; a model of quire's own does not. So it is left out until it is needed:
an import of whatever traces brings it first, as torch itself would have done.
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

LEFT_OUT = "torch._meta_registrations"
NEED_IT = ("torch._decomp", "torch._dynamo", "torch._inductor", "torch._prims", "torch._refs")


_alone = [False]  # whether this process is quire's


def tell_own_process() -> None:
    """Tell that this process is quire's alone."""
    _alone[0] = True


def import_torch() -> None:
    """Import torch, in a process that is quire's alone without what only tracing needs. Do nothing
    where torch was imported before."""
    if "torch" in sys.modules or not _alone[0]:
        return
    empty = _Empty()
    sys.meta_path.insert(0, empty)
    try:
        import torch
    finally:
        sys.meta_path.remove(empty)
        found = sys.modules.pop(LEFT_OUT, None)
    if found is not None:
        vars(torch).pop(LEFT_OUT.rpartition(".")[2], None)
        sys.meta_path.insert(0, _Bringer())


def import_rest() -> None:
    """Import what `import_torch` left out, if it did."""
    importlib.import_module(LEFT_OUT)


def new_generator(seed: int) -> "torch.Generator":
    """Make a generator of random numbers. Its class is ready only once the rest is there."""
    import_rest()
    import torch

    return torch.Generator().manual_seed(seed)


class _Empty(MetaPathFinder, Loader):
    """Finds an empty module in the place of `LEFT_OUT`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == LEFT_OUT else None

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Bringer(MetaPathFinder):
    """Imports the rest before the first module that needs it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == LEFT_OUT:
            sys.meta_path.remove(self)
        elif name in NEED_IT:
            import_rest()  # which comes here first
            if name in sys.modules:  # it was part of the rest, and must not be run again
                module = sys.modules[name]
                module.__spec__ = ModuleSpec(name, _Loaded(module))
                return module.__spec__
        return None


class _Loaded(Loader):
    """Loads a module that is there, as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
