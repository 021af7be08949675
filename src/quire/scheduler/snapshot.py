"""Snapshots: the scheduler's whole state as plain data, and back. A continued run is identical.

`dump` walks the graph of objects from the scheduler on. Objects that can be shared or part of a
cycle (instances, lists, dictionaries, arrays, ...) become entries of one flat list, the heap.
Entries refer to each other by number, so identity is preserved without recursion. All other values
are stored where they are used.

    {"root": [REF, 0], "heap": [[INSTANCE, "Scheduler", {...}], [ARRAY, "<i8", [64], ...], ...]}

Frozen vocabulary (`quire.base`: requests, plans, parameters) never changes. Containers of numbers
and text are copied quickly. Both are returned as `Deferred`, for another thread to encode. The
encoder may replace them: `Deferred.name` is the attribute that holds a value.

Integers have at most 64 bits. A class is identified by its name alone (`KINDS`), not by its module.
`restore` creates instances of these classes without calling their code, so a file cannot run code
of its own. The state differs between versions, identified by `STATE_VERSION`.
"""

import dataclasses
import enum
import math
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np

from quire.base import events, kv_orders, messages, plan, prefix, step_outputs
from quire.base.errors import EngineError
from quire.base.requests import media_items as media_item
from quire.base.requests import repetition, sampling_params
from quire.base.requests.media_items import MediaItem
from quire.base.settings import kv_transfer
from quire.kv import host_tier, manager, pool, state_table, states, table
from quire.scheduler import (
    adapter_waits,
    beams,
    scheduler,
    steering,
    suspects,
    tenants,
    time_limits,
)
from quire.scheduler.branching import branching, drafts
from quire.scheduler.core import (
    admission,
    arrivals,
    failures,
    lifecycle,
    memory,
    names,
    planning,
    plans,
    preemption,
    queue,
    rows,
    sequence,
    step_results,
)
from quire.scheduler.media import encoder_cache, media_inputs
from quire.scheduler.policy import lfu, srtf, two_level
from quire.scheduler.reuse import (
    held,
    index_changes,
    keeping,
    miss_report,
    offers,
    partial_blocks,
    pinned,
    pins,
    prefix_index,
    stores,
)
from quire.spec import cache_group

STATE_VERSION = 21  # of the state's format
OMITTED = types.MappingProxyType(  # the continuing run supplies these
    {
        "BlockNaming": ("digester", "new"), "BlockPool": ("changes",), "Holds": ("changes",),
        "Arrivals": ("_concerns",), "Planner": ("_last",),
        "Lifecycle": ("events",), "Scheduler": ("_collectors", "_handlers"),
        "Memory": ("listeners", "_finding", "_begun", "_named", "_copying", "_planned", "_limits",
                   "_grants", "_lasting", "_preparing"),
        "MissReports": ("_publish", "_last", "_open", "_young", "_old", "_evicted", "_num_evicted"),
    }
)  # fmt: skip
VOCABULARY = (
    cache_group, events, kv_orders, kv_transfer, media_item, messages, plan, prefix, repetition,
    sampling_params, step_outputs,
)  # fmt: skip
OWNERS = (
    adapter_waits, host_tier, lfu, manager, pool, state_table, states, table, admission, arrivals,
    beams, branching, drafts, encoder_cache, failures, held, index_changes, keeping, lifecycle,
    media_inputs, memory, miss_report, names, offers, partial_blocks, pinned, pins, planning, plans,
    preemption, prefix_index, queue, rows, scheduler, sequence, srtf, steering, step_results,
    stores, suspects, tenants, time_limits, two_level,
)  # fmt: skip


def _classes(modules: Iterable[types.ModuleType]) -> dict[str, type]:
    return {
        kind.__qualname__: kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__
    }


LEAVES = _classes(VOCABULARY)  # frozen vocabulary
KINDS = LEAVES | _classes(OWNERS)
# Names in the items of earlier recordings, with the names of today.
RENAMED_CLASSES = types.MappingProxyType({"HeldRequest": "RetainedRequest"})
RENAMED_FIELDS = types.MappingProxyType({"DraftOrder": {"num_guesses": "num_draft_tokens"}})

# Recordings contain these numbers, so the number of a removed kind (_) stays unused.
(
    REF, TUPLE, FROZENSET, ENUM, ARRAY, ZEROS, OBJECTS, SCALAR, LEAF, CLASS, _, LIST, DICT,
    SET, DEQUE, ORDERED, INSTANCE, NARROW,
) = range(18)  # fmt: skip

PRIMITIVES = frozenset({type(None), bool, int, float, str, bytes})
TEXTS = frozenset({str, bytes})
MAX_CELLS = 1 << 33  # maximum size of an array; a larger one means a damaged file

Data = dict[str, Any]
NOTHING: Mapping[str, Collection[str]] = types.MappingProxyType({})


class Deferred:
    """Value to encode later: frozen vocabulary, text or bytes, or a list or dictionary of
    primitives. name: the attribute that led to it."""

    __slots__ = ("name", "value")

    def __init__(self, value: Any, name: str) -> None:
        self.value = value
        self.name = name


def dump(
    root: object, omit: Mapping[str, Collection[str]] = NOTHING, blank: Iterable[str] = ()
) -> Data:
    """Return the state of an object and of all objects that it refers to.

    Args:
        root: the object.
        omit: attributes to omit, by class name.
        blank: names of attributes whose numbers become zeros.

    Raises:
        EngineError: a value cannot be saved, such as a lambda; the error names its attribute.
    """
    return _Dump(root, omit, frozenset(blank)).data()


def restore(data: Any) -> Any:
    """Return the object that was dumped, once all `Deferred` values in it are encoded. Raise
    EngineError for other data."""
    try:
        return _Restore(data["heap"]).value(data["root"])
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"a snapshot cannot be read: {type(error).__name__}: {error}") from error


def encode(value: Any) -> Any:
    """Return a value of the frozen vocabulary, or of primitives, as plain data. Identity is lost.
    Raise EngineError for other values."""
    kind = type(value)
    if kind in PRIMITIVES:
        return value
    if kind is tuple:
        return [TUPLE, *map(encode, value)]
    if kind is list:
        return [LIST, *(value if set(map(type, value)) <= PRIMITIVES else map(encode, value))]
    if kind is dict:
        return [DICT, *(encode(item) for pair in value.items() for item in pair)]
    if isinstance(value, frozenset):
        return [FROZENSET, *map(encode, value)]
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, enum.StrEnum):
        return value.value
    if isinstance(value, enum.Enum):
        return [ENUM, _name(kind), value.name]
    if isinstance(value, np.generic):
        return [SCALAR, value.dtype.str, value.tobytes()]
    if LEAVES.get(kind.__qualname__) is kind:
        return [LEAF, _name(kind), {name: encode(item) for name, item in _contents(value, kind)}]
    if callable(value):  # a request's logits processor: only its name is saved
        return f"function {getattr(value, '__qualname__', kind.__qualname__)}"
    raise EngineError(f"a {kind.__qualname__} cannot be saved in a snapshot.")


def decode(data: Any) -> Any:
    """Return the value that was encoded by `encode`. Raise EngineError for other data."""
    return restore({"root": data, "heap": []})


def with_current_names(data: Any) -> Any:
    """Return the encoded values of an earlier recording with the class and field names of today.
    Still earlier recordings also stored the module of each class."""
    if isinstance(data, dict):
        return {key: with_current_names(value) for key, value in data.items()}
    if not isinstance(data, list):
        return data
    if len(data) == 3 and data[0] in (LEAF, ENUM) and isinstance(data[1], str):
        name = data[1].rpartition(":")[2]
        content = with_current_names(data[2])
        if fields := RENAMED_FIELDS.get(name):
            content = {fields.get(key, key): value for key, value in content.items()}
        return [data[0], RENAMED_CLASSES.get(name, name), content]
    return [with_current_names(value) for value in data]


class _Dump:
    """Walk over the objects, which numbers heap objects as it finds them."""

    def __init__(
        self, root: object, omit: Mapping[str, Collection[str]], blank: frozenset[str]
    ) -> None:
        self.root, self.omit, self.blank = root, omit, blank
        self.numbers: dict[int, int] = {}  # id of an object -> its number in the heap
        self.found: list[tuple[Any, str]] = []  # heap objects, with the attribute that led there
        self.names: dict[type, str] = {}

    def data(self) -> Data:
        top = self.refer(self.root, "root")
        heap: list[Any] = []
        while len(heap) < len(self.found):  # entries append the objects that they refer to
            value, name = self.found[len(heap)]
            heap.append(self.entry(value, name))
        return {"root": top, "heap": heap}

    def refer(self, value: Any, name: str) -> Any:
        """Return the reference to a value, or the value itself, for use in another entry."""
        kind = type(value)
        if kind in TEXTS:
            return Deferred(value, name)
        if kind in PRIMITIVES:
            return encode(value)
        if kind is tuple:
            items = [0] * len(value) if name in self.blank else value
            return [TUPLE, *(self.refer(item, name) for item in items)]
        if kind is frozenset:
            return [FROZENSET, *(self.refer(item, name) for item in value)]
        if isinstance(value, (enum.Enum, np.generic)):
            return encode(value)
        if isinstance(value, type):
            return [CLASS, self.name(value, name)]
        number = self.numbers.setdefault(id(value), len(self.found))
        if number == len(self.found):
            self.found.append((value, name))
        return [REF, number]

    def entry(self, value: Any, name: str) -> Any:
        """Return the contents of a heap object."""
        kind = type(value)
        if kind is list or kind is dict or kind is OrderedDict:
            return self.container(value, kind, name)
        if kind is set:
            return [SET, *(self.refer(item, name) for item in value)]
        if kind is deque:
            return [DEQUE, value.maxlen, *(self.refer(item, name) for item in value)]
        if isinstance(value, np.ndarray):
            if value.dtype != object:
                is_blank = name in self.blank
                return [ZEROS, value.dtype.str, value.shape] if is_blank else _array(value)
            return [OBJECTS, value.shape, *(self.refer(item, name) for item in value.flat)]
        if LEAVES.get(kind.__qualname__) is kind:
            return Deferred(value, name)
        omit = self.omit.get(kind.__qualname__, ())
        state = {
            attribute: self.refer(getattr(value, attribute), attribute)
            for attribute in _attributes(value)
            if attribute not in omit
        }
        return [INSTANCE, self.name(kind, name), state]

    def container(self, value: Any, kind: type, name: str) -> Any:
        kinds = set(map(type, value))
        if kind is list:
            if kinds <= PRIMITIVES:
                return Deferred(value.copy(), name) if kinds & TEXTS else [LIST, *value]
            return [LIST, *(self.refer(item, name) for item in value)]
        tag = DICT if kind is dict else ORDERED
        kinds |= set(map(type, value.values()))
        if kinds <= PRIMITIVES - TEXTS:
            return [tag, *chain.from_iterable(value.items())]
        if kind is dict and kinds <= PRIMITIVES:
            return Deferred(value.copy(), name)
        return [tag, *(self.refer(item, name) for pair in value.items() for item in pair)]

    def name(self, label: type, found_at: str) -> str:
        """Return the saved name of a class. Raise EngineError if it cannot be saved."""
        if label not in self.names:
            try:
                self.names[label] = _name(label)
            except EngineError as error:
                raise EngineError(f"the scheduler's state, at {found_at!r}: {error}") from error
        return self.names[label]


class _Restore:
    """Creation of all objects, empty at first. Instances are filled first, since sets and
    dictionaries may hash them."""

    def __init__(self, heap: list[Any]) -> None:
        self.heap = heap
        self.shells = [self.shell(entry) for entry in heap]
        for first in (INSTANCE, LIST, DICT):
            for entry, shell in zip(heap, self.shells, strict=True):
                if FILLED_WITH.get(entry[0]) == first:
                    self.fill(entry, shell)

    def shell(self, entry: Any) -> Any:
        tag = entry[0]
        if tag == INSTANCE:
            return object.__new__(_class(entry[1]))
        if tag in EMPTY:
            return EMPTY[tag]()
        if tag == DEQUE:
            return deque(maxlen=entry[1])
        if tag == OBJECTS:
            return np.full(_shape(entry[1]), None, object)
        return self.value(entry)  # a number array or frozen vocabulary, without references

    def fill(self, entry: Any, shell: Any) -> None:
        tag, value = entry[0], self.value
        if tag == INSTANCE:
            for name, item in entry[2].items():
                if name.startswith("__"):
                    raise EngineError(f"a snapshot sets {name!r}, which is not a state.")
                object.__setattr__(shell, name, value(item))
        elif tag in (LIST, SET):
            add: Callable[[Any], None] = shell.append if tag == LIST else shell.add
            for item in entry[1:]:
                add(value(item))
        elif tag == DEQUE:
            shell.extend(value(item) for item in entry[2:])
        elif tag == OBJECTS:
            for i, item in enumerate(entry[2:]):
                shell.flat[i] = value(item)
        else:
            for key, item in zip(entry[1::2], entry[2::2], strict=True):
                shell[value(key)] = value(item)

    def value(self, data: Any) -> Any:
        """Return a value that is stored where it is used."""
        if type(data) in PRIMITIVES:
            return data
        tag, *rest = data
        if tag == REF:
            return self.shells[rest[0]]
        if tag == LEAF:
            made = {name: self.value(item) for name, item in rest[1].items()}
            return _class(rest[0], LEAVES)(**made)
        if tag == DICT:
            items = [self.value(item) for item in rest]
            return dict(zip(items[::2], items[1::2], strict=True))
        if tag in SEQUENCES:
            return SEQUENCES[tag](self.value(item) for item in rest)
        return _plain(tag, rest)


EMPTY: dict[int, Callable[[], Any]] = {LIST: list, DICT: dict, SET: set, ORDERED: OrderedDict}
SEQUENCES: dict[int, Callable[[Iterable[Any]], Any]] = {
    TUPLE: tuple, FROZENSET: frozenset, LIST: list,
}  # fmt: skip
FILLED_WITH = {
    INSTANCE: INSTANCE, LIST: LIST, DEQUE: LIST, OBJECTS: LIST, DICT: DICT, ORDERED: DICT, SET: DICT
}  # fmt: skip


def _plain(tag: int, rest: list[Any]) -> Any:
    """Return a value without references."""
    if tag == ARRAY:
        return np.frombuffer(rest[2], _dtype(rest[0])).reshape(_shape(rest[1])).copy()
    if tag == ZEROS:
        return np.zeros(_shape(rest[1]), _dtype(rest[0]))
    if tag == NARROW:
        array = np.zeros(_shape(rest[1]), _dtype(rest[0]))
        array[:, : rest[2]] = np.frombuffer(rest[3], array.dtype).reshape(-1, rest[2])
        return array
    if tag == SCALAR:
        return np.frombuffer(rest[1], _dtype(rest[0]))[0]
    if tag == ENUM:
        return _class(rest[0])[rest[1]]
    if tag == CLASS:
        return _class(rest[0])
    raise EngineError(f"a snapshot holds a value of the unknown kind {tag}.")


def _array(array: np.ndarray[Any, Any]) -> list[Any]:
    """Encode an array. Of a two-dimensional one, omit the zero columns at its end."""
    head = array.dtype.str, array.shape
    if array.size > 64 and not array.any():
        return [ZEROS, *head]
    if array.ndim == 2 and array.size > 64 and not array[:, -1].any():
        width = int(np.flatnonzero(array.any(0))[-1]) + 1
        return [NARROW, *head, width, array[:, :width].tobytes()]
    return [ARRAY, *head, array.tobytes()]


def _dtype(name: str) -> "np.dtype[Any]":
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise EngineError(f"a snapshot holds an array of {name!r}.")
    return dtype


def _shape(sizes: Iterable[int]) -> tuple[int, ...]:
    shape = tuple(sizes)
    if math.prod(shape) > MAX_CELLS:
        raise EngineError(f"a snapshot holds an array of the shape {shape}.")
    return shape


def _contents(value: Any, kind: type) -> list[tuple[str, Any]]:
    """Return the fields of a dataclass, or the fields of a msgspec struct that differ from their
    defaults. Dataclass fields marked `is_omitted` are skipped at their default."""
    if isinstance(value, MediaItem):
        value = value.without_pixels
    if dataclasses.is_dataclass(kind):
        found = [(item, getattr(value, item.name)) for item in dataclasses.fields(kind)]
        return [
            (item.name, content)
            for item, content in found
            if not (item.metadata.get("is_omitted") and content == item.default)
        ]
    names: tuple[str, ...] = getattr(kind, "__struct_fields__", ())
    defaults: tuple[Any, ...] = getattr(kind, "__struct_defaults__", ())
    first = len(names) - len(defaults)
    items = [(name, getattr(value, name)) for name in names]
    rest = zip(items[first:], defaults, strict=True)
    return items[:first] + [item for item, default in rest if item[1] is not default]


def _attributes(value: object) -> list[str]:
    """Return the names of the attributes that are set, in slots or in a dictionary."""
    found = [
        name
        for kind in type(value).__mro__
        for name in _as_tuple(vars(kind).get("__slots__", ()))
        if name not in ("__dict__", "__weakref__")
    ]
    own = vars(value) if "__dict__" in dir(value) else {}
    return [*found, *own]


def _as_tuple(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _name(kind: type) -> str:
    """Return the saved name of a class. Raise EngineError if it cannot be saved."""
    name = kind.__qualname__
    if KINDS.get(name) is not kind:
        raise EngineError(f"{kind.__module__}.{name} cannot be saved in a snapshot.")
    return name


def _class(name: str, kinds: Mapping[str, type] = KINDS) -> Any:
    """Return the class of this name. Earlier recordings stored the module with it."""
    found = kinds.get(name.rpartition(":")[2])
    if found is None:
        raise EngineError(f"a snapshot names {name!r}, which is not a class of the scheduler.")
    return found
