"""Find plug-ins: classes of packages, by entry points, or of one file (docs/extend/README.md).

A built-in name always means the built-in class. Entry points are read only for other names, so
unused plug-ins cost nothing. `./mine.py:Policy` is the class `Policy` of that file. A check
of such a name parses the file; only `load_plugin` runs it. A name that a model's files may choose
never means a file, because quire runs no code from a model's repository.
"""

import ast
import logging
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.base.errors import ConfigError, MissingDependency, ModelError, QuireError
from quire.base.requests.hooks import METHODS

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger("quire")
PYTHON_SUFFIX = ".py"


@dataclass(frozen=True)
class PluginKind:
    """A kind of class that a package may provide."""

    group: str  # name of the entry points' group
    noun: str  # name in messages
    methods: tuple[str, ...]  # required methods
    error: type[QuireError] = ConfigError  # raised if the class is missing or unusable
    any_of: bool = False  # whether one of the methods is enough
    in_files: bool = True  # whether a name may be `FILE.py:CLASS`


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
GPU_ATTENTION = ("triton", "triton_64", "flashinfer", "flash_attention_3", "cudnn")  # built in
ATTENTION_BACKENDS = PluginKind(
    "quire.attention_backends",
    "attention backend",
    ("prepare", "write", "run", "copy_blocks", "swap_out", "load"),
)
MODELS = PluginKind("quire.models", "model type", ("forward", "logits"), ModelError, in_files=False)
CONNECTORS = PluginKind(
    "quire.connectors", "KV store", ("find", "get", "put", "remove", "close"), in_files=False
)
TRANSFERS = PluginKind(
    "quire.transfers",
    "transfer of KV blocks",
    ("register", "describe", "connect", "read", "disconnect", "close"),
    in_files=False,
)
TOOL_FORMATS = PluginKind("quire.tool_formats", "format of tool calls", ("format",))
REASONING_FORMATS = PluginKind("quire.reasoning_formats", "format of reasoning", ("format",))
HOOKS = PluginKind("quire.hooks", "hook", METHODS, any_of=True)
LOGITS_PROCESSORS = PluginKind("quire.logits_processors", "logits processor", ("process",))
IMAGE_PROCESSORS = PluginKind(
    "quire.image_processors", "image processor", ("process", "placeholder"), ModelError,
    in_files=False,
)  # fmt: skip
DRAFTERS = PluginKind("quire.drafters", "drafter", ("extend", "propose"))
EXTENSIONS = PluginKind(
    "quire.scheduler_extensions",
    "scheduler extension",
    ("find", "named", "limit", "accept", "enter", "leave", "expire", "updated"),
    any_of=True,
)
OWN_EXTENSIONS = ("sessions",)  # names of quire's own scheduler extensions
KINDS = (
    POLICIES, EXTENSIONS, EVICTION_POLICIES, BLOCK_HASHES, ATTENTION_BACKENDS, MODELS, CONNECTORS,
    TRANSFERS, DRAFTERS, TOOL_FORMATS, REASONING_FORMATS, HOOKS, LOGITS_PROCESSORS,
    IMAGE_PROCESSORS,
)  # fmt: skip


class FileClass(NamedTuple):
    """The name of a class in a file, `PATH.py:CLASS`."""

    path: Path
    name: str


def file_class(name: str) -> FileClass | None:
    """Parse the name of a class in a file; None for other names."""
    path, colon, own = name.rpartition(":")
    return FileClass(Path(path), own) if colon and path.endswith(PYTHON_SUFFIX) else None


def short_name(name: str) -> str:
    """Return the name by which requests and the log refer to a plug-in."""
    found = file_class(name)
    return name if found is None else found.name


def all_names(kind: PluginKind, built_in: Iterable[str]) -> str:
    """Return the names for messages: built-in names, then the names of installed packages."""
    ours = tuple(built_in)
    found = [f"{point.name} (of {_package(point)})" for point in _entry_points(kind, ours)]
    return ", ".join([*ours, *found])


def is_installed(kind: PluginKind, name: str, built_in: Iterable[str]) -> bool:
    """Return whether a package or a file provides this name, without importing it. Raises the
    kind's error for a file that lacks the class."""
    in_file = file_class(name) if kind.in_files else None
    if in_file is not None:
        _check_file(kind, in_file)
        return True
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
    """Return a class of a package or a file by its name, which is not a built-in name.

    Raises the kind's error if no package or several packages provide the name, or if the class is
    unusable.
    """
    in_file = file_class(name) if kind.in_files else None
    if in_file is not None:
        return _load_from_file(kind, in_file)
    ours = tuple(built_in)
    found = [point for point in _entry_points(kind, ours) if point.name == name]
    if not found:
        raise kind.error(f"there is no {kind.noun} {name!r}; there are {all_names(kind, ours)}.")
    if len(found) > 1:
        packages = " and ".join(_package(point) for point in found)
        raise kind.error(f"{packages} both provide a {kind.noun} {name!r}; uninstall one of them.")
    [point] = found
    plugin = f"the {kind.noun} {name!r} of the package {_package(point)}, {point.value},"
    return _usable(kind, plugin, point.load, "Repair the package, or use another.")


def _usable(kind: PluginKind, plugin: str, load: Callable[[], Any], advice: str) -> type[Any]:
    """Load a class and check it. plugin: its description, for messages."""
    try:
        loaded = load()
    except MissingDependency:
        raise
    except Exception as error:
        raise kind.error(
            f"{plugin} cannot be imported: {type(error).__name__}: {error}. {advice}"
        ) from error
    reason = _why_not(kind, loaded)
    if reason is not None:
        raise kind.error(f"{plugin} cannot be used: {reason}.")
    found_class: type[Any] = loaded
    return found_class


def _check_file(kind: PluginKind, found: FileClass) -> None:
    """Raise the kind's error if a file cannot be read or parsed, or does not define the class."""
    try:
        tree = ast.parse(found.path.read_bytes(), filename=str(found.path))
    except OSError as error:
        reason = error.strerror or str(error)
        raise kind.error(
            f"the {kind.noun} cannot be read from {found.path}: {reason}. The path is relative to"
            f" {Path.cwd()}."
        ) from error
    except (SyntaxError, ValueError) as error:
        raise kind.error(
            f"{found.path} holds no valid Python: {error}. Correct it and try again."
        ) from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if found.name not in classes:
        known = ", ".join(classes) or "none"
        raise kind.error(f"{found.path} has no class {found.name!r}; it has: {known}.")


def _load_from_file(kind: PluginKind, found: FileClass) -> type[Any]:
    """Run a file once in this process and return its class. Raises the kind's error."""
    _check_file(kind, found)
    path = found.path.resolve()
    plugin = f"the {kind.noun} {found.name!r} of {found.path}"

    def load() -> Any:
        return getattr(_module_of(path), found.name)

    return _usable(kind, plugin, load, "Correct the file and try again.")


def _module_of(path: Path) -> ModuleType:
    """Return the module of a file. All classes of a file share one module in a process."""
    from importlib.util import module_from_spec, spec_from_file_location

    name = f"quire_file_{zlib.crc32(str(path).encode()):08x}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


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
