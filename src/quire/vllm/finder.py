"""A finder of modules that answers `import vllm...` with quire's names, in this process only."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from quire.vllm.names import MODULES, VLLM, reason_for


def install() -> None:
    """Let this process find vLLM's modules here, even if vLLM is installed. A second call does
    nothing. Raises ImportError if another vllm has been imported before."""
    if any(isinstance(finder, VllmFinder) for finder in sys.meta_path):
        return
    if VLLM in sys.modules:
        raise ImportError("vllm is imported already; install quire's names before the import.")
    sys.meta_path.insert(0, VllmFinder())


class VllmFinder(MetaPathFinder):
    """Finds the modules of the table, and refuses vLLM's other modules with a reason."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a module of vLLM; None for other packages' modules. Raises
        ModuleNotFoundError for a module of vLLM that quire does not offer."""
        if fullname.partition(".")[0] != VLLM:
            return None
        if fullname not in MODULES:
            # The package's name, so that `from vllm import NAME` raises this error, too.
            raise ModuleNotFoundError(
                f"{fullname} is not offered by quire: {reason_for(fullname)}.", name=VLLM
            )
        return ModuleSpec(fullname, _NamesLoader(), is_package=True)


class _NamesLoader(Loader):
    """Makes a module whose names are imported when they are first read."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name, f"Names of {spec.name}, from quire.")

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__all__"] = sorted(set(MODULES[module.__name__]) - {"__version__"})


class _Names(ModuleType):
    """A module of vLLM with quire's names."""

    def __getattr__(self, name: str) -> Any:
        home = MODULES[self.__name__].get(name)
        if home is None:
            full_name = f"{self.__name__}.{name}"
            if full_name in MODULES:
                return import_module(full_name)
            raise AttributeError(f"{full_name} is not offered by quire: {reason_for(full_name)}.")
        module, _, own_name = home.partition(":")
        found = getattr(import_module(module), own_name or name)
        setattr(self, name, found)
        return found

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *MODULES[self.__name__]})
