"""Choice by name of scheduler extensions, which `Scheduler` attaches after its own parts."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from quire.base.errors import ConfigError
from quire.base.plugins import EXTENSIONS, load_plugin, short_name
from quire.kv.manager import KVManager
from quire.scheduler.core.extension import CacheListener, Extension, HitSource, StepExtension
from quire.scheduler.reuse.finished_branches import FinishedBranches

BUILT_IN: Mapping[str, Callable[[KVManager], object]] = MappingProxyType(
    {"sessions": FinishedBranches}
)
INTERFACES = (HitSource, CacheListener, Extension, StepExtension)


def extension_classes(names: Iterable[str]) -> list[Callable[[KVManager], object]]:
    """Return the classes of these names, in order. Raises ConfigError for one that is unusable."""
    return [_extension_class(name) for name in names]


def _extension_class(name: str) -> Callable[[KVManager], object]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    found: Any = load_plugin(EXTENSIONS, name, BUILT_IN)
    if not issubclass(found, INTERFACES):
        raise ConfigError(
            f"the scheduler extension {short_name(name)!r} cannot be used: it must be a subclass of"
            f" {', '.join(each.__name__ for each in INTERFACES)}."
        )

    make_one: Callable[[KVManager], object] = found

    def make(kv: KVManager) -> object:
        try:
            return make_one(kv)
        except Exception as error:
            raise ConfigError(
                f"the scheduler extension {short_name(name)!r} cannot be created:"
                f" {type(error).__name__}: {error}. Its class is called with a KVManager."
            ) from error

    return make
