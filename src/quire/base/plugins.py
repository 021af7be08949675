"""Find plug-ins: classes that entry points of quire and of packages name (docs/extend/README.md).

A built-in name always means the built-in class. Entry points are read only for other names, so
unused plug-ins cost nothing.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.base.errors import ConfigError, MissingDependency, ModelError, QuireError
from quire.base.requests.hooks import METHODS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger("quire")


@dataclass(frozen=True)
class PluginKind:
    """A kind of class that a package may provide."""

    group: str  # name of the entry points' group
    noun: str  # name in messages
    methods: tuple[str, ...]  # required methods
    error: type[QuireError] = ConfigError  # raised if the class is missing or unusable
    any_of: bool = False  # whether one of the methods is enough


POLICIES = PluginKind(
    "quire.policies",
    "scheduling policy",
    ("push", "peek", "pass_over", "remove", "rank", "waiting", "__len__"),
)
EVICTION_POLICIES = PluginKind(
    "quire.eviction_policies",
    "eviction policy",
    ("__setitem__", "__delitem__", "__iter__", "__len__", "move_to_end"),
)
BLOCK_HASHES = PluginKind("quire.block_hashes", "block hash", ("digest",))
ATTENTION_BACKENDS = PluginKind(
    "quire.attention_backends",
    "attention backend",
    ("prepare", "write", "run", "copy_blocks", "swap_out", "load"),
)
MODELS = PluginKind("quire.models", "model type", ("forward", "logits"), ModelError)
CONNECTORS = PluginKind("quire.connectors", "KV store", ("find", "get", "put", "remove", "close"))
TRANSFERS = PluginKind(
    "quire.transfers",
    "transfer of KV blocks",
    ("register", "describe", "connect", "read", "disconnect", "close"),
)
TOOL_FORMATS = PluginKind("quire.tool_formats", "format of tool calls", ("format",))
REASONING_FORMATS = PluginKind("quire.reasoning_formats", "format of reasoning", ("format",))
HOOKS = PluginKind("quire.hooks", "hook", METHODS, any_of=True)
LOGITS_PROCESSORS = PluginKind("quire.logits_processors", "logits processor", ("process",))
IMAGE_PROCESSORS = PluginKind(
    "quire.image_processors", "image processor", ("process", "placeholder"), ModelError
)
KINDS = (
    POLICIES, EVICTION_POLICIES, BLOCK_HASHES, ATTENTION_BACKENDS, MODELS, CONNECTORS,
    TRANSFERS, TOOL_FORMATS, REASONING_FORMATS, HOOKS, LOGITS_PROCESSORS, IMAGE_PROCESSORS,
)  # fmt: skip


def all_names(kind: PluginKind, built_in: Iterable[str]) -> str:
    """Return the names for messages: built-in names, then the names of installed packages."""
    ours = tuple(built_in)
    found = [f"{point.name} (of {_package(point)})" for point in _entry_points(kind, ours)]
    return ", ".join([*ours, *found])


def is_installed(kind: PluginKind, name: str, built_in: Iterable[str]) -> bool:
    """Return whether a package provides this name, without importing the package."""
    return any(point.name == name for point in _entry_points(kind, tuple(built_in)))


def installed() -> list[tuple[str, str, str]]:
    """Return other packages' plug-ins as (name, noun, package with version). Imports nothing."""
    from importlib.metadata import entry_points

    return [
        (point.name, kind.noun, _package(point))
        for kind in KINDS
        for point in sorted(entry_points(group=kind.group), key=lambda point: point.name)
        if point.dist is None or point.dist.name != "quire"
    ]


def load_plugin(kind: PluginKind, name: str, built_in: Iterable[str]) -> type[Any]:
    """Return a package's class by its name, which is not a built-in name.

    Raises the kind's error if no package or several packages provide the name, or if the class is
    unusable.
    """
    ours = tuple(built_in)
    found = [point for point in _entry_points(kind, ours) if point.name == name]
    if not found:
        raise kind.error(f"there is no {kind.noun} {name!r}; there are {all_names(kind, ours)}.")
    if len(found) > 1:
        packages = " and ".join(_package(point) for point in found)
        raise kind.error(f"{packages} both provide a {kind.noun} {name!r}; uninstall one of them.")
    [point] = found
    plugin = f"the {kind.noun} {name!r} of the package {_package(point)}, {point.value},"
    try:
        loaded = point.load()
    except MissingDependency:
        raise
    except Exception as error:
        raise kind.error(
            f"{plugin} cannot be imported: {type(error).__name__}: {error}. Repair the package, or"
            " use another."
        ) from error
    reason = _why_not(kind, loaded)
    if reason is not None:
        raise kind.error(f"{plugin} cannot be used: {reason}.")
    found_class: type[Any] = loaded
    return found_class


def _why_not(kind: PluginKind, loaded: Any) -> str | None:
    """Return why an entry point's object is not of this kind; None if it is."""
    if not isinstance(loaded, type):
        return f"it must be a class, and is a {type(loaded).__name__}"
    missing = [name for name in kind.methods if not callable(getattr(loaded, name, None))]
    if kind.any_of and len(missing) < len(kind.methods):
        return None
    return f"it has no {', '.join(missing)}" if missing else None


def _entry_points(kind: PluginKind, built_in: tuple[str, ...]) -> "list[EntryPoint]":
    """Return installed entry points by name; warn about built-in names and omit them."""
    from importlib.metadata import entry_points  # imported late, because it takes 20 ms

    found = []
    for point in sorted(entry_points(group=kind.group), key=lambda point: point.name):
        if point.name in built_in:
            logger.warning(
                "the package %s provides a %s %r, which is also built in; the built-in one is used",
                _package(point), kind.noun, point.name,
            )  # fmt: skip
        else:
            found.append(point)
    return found


def _package(point: "EntryPoint") -> str:
    return "?" if point.dist is None else f"{point.dist.name} {point.dist.version}"
