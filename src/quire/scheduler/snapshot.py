"""The scheduler's whole state as plain data, and back: a continued run cannot tell the difference.

`dump` walks the graph of objects from the scheduler on. What can be shared or part of a cycle
(instances, lists, dictionaries, arrays, ...) becomes an entry of one flat list, the heap, in which
entries name each other by number; so identity is kept and nothing recurses. All other values stand
where they are used.

    {"root": [REF, 0], "heap": [[INSTANCE, "Scheduler", {...}], [ARRAY, "<i8", [64], ...], ...]}

Frozen vocabulary (`quire.base`: requests, plans, parameters) never changes after it was made, and
what holds nothing but numbers and text is copied quickly; both are left as `Deferred`, for another
thread to encode. Who encodes may replace them: `Deferred.name` is the attribute that holds a value.

Integers have at most 64 bits. A class is known by its name alone (`KINDS`), not by where it is
defined. `restore` makes instances of these without calling anything of theirs, so that a file
cannot make it run code of its own. Other versions keep other state: `STATE_VERSION` tells them
apart.
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
from quire.scheduler import beams, scheduler, steering, suspects, time_limits
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
from quire.scheduler.reuse import held, miss_report, offers, pinned, pins, stores
from quire.spec import cache_group

STATE_VERSION = 16  # of what is kept of the state
OMITTED = types.MappingProxyType(  # what a run that goes on from a snapshot brings itself
    {
        "BlockNaming": ("digester", "new"), "BlockPool": ("changes",), "Holds": ("changes",),
        "Arrivals": ("_concerns",),
        "Lifecycle": ("events",), "Scheduler": ("_collectors", "_handlers"),
        "Memory": ("listeners", "_finding", "_begun", "_named", "_copying", "_planned", "_limits",
                   "_grants"),
        "MissReports": ("_tell", "_last", "_open", "_young", "_old"),
    }
)  # fmt: skip
VOCABULARY = (
    cache_group, events, kv_orders, kv_transfer, media_item, messages, plan, prefix, repetition,
    sampling_params, step_outputs,
)  # fmt: skip
OWNERS = (
    host_tier, lfu, manager, pool, state_table, states, table, admission, arrivals, beams,
    branching, drafts, encoder_cache, failures, held, lifecycle, media_inputs, memory, miss_report,
    names, offers, pinned, pins, planning, plans, preemption, queue, rows, scheduler, sequence,
    srtf, steering, step_results, stores, suspects, time_limits, two_level,
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

# Recordings hold these numbers, so that of a kind that is gone stays free.
(
    REF, TUPLE, FROZENSET, ENUM, ARRAY, ZEROS, OBJECTS, SCALAR, LEAF, CLASS, _, LIST, DICT,
    SET, DEQUE, ORDERED, INSTANCE, NARROW,
) = range(18)  # fmt: skip

PRIMITIVES = frozenset({type(None), bool, int, float, str, bytes})
TEXTS = frozenset({str, bytes})
MAX_CELLS = 1 << 33  # of an array; more than that is a damaged file

Data = dict[str, Any]
NOTHING: Mapping[str, Collection[str]] = types.MappingProxyType({})


class Deferred:
    """A value that is encoded later: frozen vocabulary, text or bytes, or a list or dictionary of
    primitives. name: the attribute that led to it."""

    __slots__ = ("name", "value")

    def __init__(self, value: Any, name: str) -> None:
        self.value = value
        self.name = name


def dump(
    root: object, omit: Mapping[str, Collection[str]] = NOTHING, blank: Iterable[str] = ()
) -> Data:
    """Return the state of an object and of all that it refers to. omit: attributes to leave out, by
    the name of the class; blank: attributes of any object whose numbers become zeros.

    Raises EngineError that names the place of a value that cannot be kept, such as a lambda.
    """
    return _Dump(root, omit, frozenset(blank)).data()


def restore(data: Any) -> Any:
    """Make again what was dumped, once all `Deferred` in it are encoded. Raises EngineError for
    other data."""
    try:
        return _Restore(data["heap"]).value(data["root"])
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"a snapshot cannot be read: {type(error).__name__}: {error}") from error


def encode(value: Any) -> Any:
    """Turn a value of the frozen vocabulary, or of primitives, into plain data. Identity is
    lost."""
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
    if callable(value):  # a logits processor of a request: only its name is kept
        return f"function {getattr(value, '__qualname__', kind.__qualname__)}"
    raise EngineError(f"a {kind.__qualname__} cannot be saved in a snapshot.")


def decode(data: Any) -> Any:
    """Return the value that `encode` was given. Raises EngineError."""
    return restore({"root": data, "heap": []})


def without_modules(data: Any) -> Any:
    """Bring encoded values up to date: earlier recordings named the modules of classes, too."""
    if isinstance(data, dict):
        return {key: without_modules(value) for key, value in data.items()}
    if not isinstance(data, list):
        return data
    if len(data) == 3 and data[0] in (LEAF, ENUM) and isinstance(data[1], str):
        return [data[0], data[1].rpartition(":")[2], without_modules(data[2])]
    return [without_modules(value) for value in data]


class _Dump:
    """Walks the objects, and numbers those of the heap as it finds them."""

    def __init__(
        self, root: object, omit: Mapping[str, Collection[str]], blank: frozenset[str]
    ) -> None:
        self.root, self.omit, self.blank = root, omit, blank
        self.numbers: dict[int, int] = {}  # id of an object -> its number in the heap
        self.found: list[tuple[Any, str]] = []  # the objects, with the attribute that led there
        self.names: dict[type, str] = {}

    def data(self) -> Data:
        top = self.refer(self.root, "root")
        heap: list[Any] = []
        while len(heap) < len(self.found):  # entries refer to others, which are appended
            value, name = self.found[len(heap)]
            heap.append(self.entry(value, name))
        return {"root": top, "heap": heap}

    def refer(self, value: Any, name: str) -> Any:
        """Return what stands for a value in the entry of another."""
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
        """Return the contents of an object of the heap."""
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

    def name(self, what: type, found_at: str) -> str:
        """Return the name by which a class is known. Raises EngineError for one that cannot be
        kept."""
        if what not in self.names:
            try:
                self.names[what] = _name(what)
            except EngineError as error:
                raise EngineError(f"the scheduler's state, at {found_at!r}: {error}") from error
        return self.names[what]


class _Restore:
    """Makes all objects empty, then fills them: instances first, because others may hash them."""

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
        return self.value(entry)  # a number array, or frozen vocabulary: it refers to nothing

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
        """Return a value that stands where it is used."""
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
    """Make a value that refers to nothing."""
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
    """Encode an array; of a table, without the columns at its end that are zero."""
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
    """List the fields of a dataclass, or those of a msgspec struct that differ from their
    defaults. A dataclass may mark fields that are omitted where they have their default."""
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
    """List the attributes that are set, whether in slots or in a dictionary."""
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
    """Return the name by which a class is known. Raises EngineError for one that cannot be kept."""
    name = kind.__qualname__
    if KINDS.get(name) is not kind:
        raise EngineError(f"{kind.__module__}.{name} cannot be saved in a snapshot.")
    return name


def _class(name: str, kinds: Mapping[str, type] = KINDS) -> Any:
    """Return the class of this name; earlier recordings named the module, too."""
    found = kinds.get(name.rpartition(":")[2])
    if found is None:
        raise EngineError(f"a snapshot names {name!r}, which is not a class of the scheduler.")
    return found
