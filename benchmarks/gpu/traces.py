"""Faster loads, stores, products and shapes for Triton's interpreter.

The interpreter checks and broadcasts the operands of each of these calls again, in tens of
microseconds of Python. At the end it passes arrays to a few methods of its builder. Which methods,
and with which constants, depends only on the operands' types and shapes and on numbers. So the
first call with such operands records them as a trace. Calls of the builder whose arguments are all
constant run once. Later calls run the rest of the trace.

Nothing is recorded where a value that the builder did not make is passed to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

# No other function of `triton.language` reads numbers of its operands in few enough ways.
TRACED = {
    "arange", "broadcast_to", "dot", "exp", "exp2", "expand_dims", "full", "load", "log", "log2",
    "num_programs", "permute", "program_id", "reshape", "rsqrt", "sqrt", "store", "trans",
}  # fmt: skip
# Methods of the builder that act, or whose results differ between programs of a launch.
NEVER_CONSTANT = {
    "create_get_num_programs", "create_get_program_id", "create_load", "create_masked_load",
    "create_masked_store", "create_store",
}  # fmt: skip
PLAIN = (int, bool, str, type(None))


class Step(NamedTuple):
    """A call of a method of the builder."""

    method: str
    arguments: tuple[Any, ...]  # the constants among them
    places: tuple[tuple[int, int], ...]  # an argument's index, and the index of its value


class Trace(NamedTuple):
    """Calls of the builder for operands of certain types. Values are the operands' handles,
    followed by the steps' results."""

    steps: tuple[Step, ...]
    value: int  # index of the value that is returned, or -1
    constant: Any  # or the handle that is returned
    nothing: Any  # or what a store returns
    attributes: dict[str, Any]  # of the result, but for its handle


class Recorder:
    """Stands for the interpreter's builder, and notes the calls of its methods."""

    def __init__(self, builder: Any, handle_class: type, handles: Sequence[Any]) -> None:
        self._builder, self._handle_class = builder, handle_class
        self.steps: list[Step] = []
        self.values = {id(handle): i for i, handle in enumerate(handles)}
        self.constants: dict[int, Any] = {}
        self.is_complete = len(self.values) == len(handles)
        self._num_values = len(handles)
        self._kept: list[Any] = [*handles]  # so that no other object gets their ids

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not callable(member):
            return member

        def call(*arguments: Any, **options: Any) -> Any:
            result = member(*arguments, **options)
            self._note(name, arguments, result)
            self.is_complete &= not options
            return result

        return call

    def _note(self, method: str, arguments: tuple[Any, ...], result: Any) -> None:
        places = []
        for at, each in enumerate(arguments):
            if type(each) is not self._handle_class:
                self.is_complete &= not _holds(each, self._handle_class)
            elif id(each) in self.values:
                places.append((at, self.values[id(each)]))
            else:
                self.is_complete &= id(each) in self.constants
        made = [each for each in _members(result) if type(each) is self._handle_class]
        self._kept += made
        if not places and method not in NEVER_CONSTANT:
            self.constants |= {id(each): each for each in made}
            return
        taken = {at for at, _ in places}
        constants = tuple(None if i in taken else each for i, each in enumerate(arguments))
        self.steps.append(Step(method, constants, tuple(places)))
        for each in made:
            self.values[id(each)] = self._num_values
            self._num_values += 1


class Traces:
    """Replaces functions of `triton.language` by functions that follow traces. core:
    `triton.language.core`; interpreter: `triton.runtime.interpreter`."""

    def __init__(self, core: Any, interpreter: Any) -> None:
        self._tensor, self._constexpr, self._dtype = core.tensor, core.constexpr, core.dtype
        self._tuple = core.tuple
        self._handle_class = interpreter.TensorHandle
        semantic = interpreter.TritonSemantic

        class Recording(semantic):  # type: ignore[misc, valid-type]
            """Semantics without planned broadcasts, whose arrays the builder does not make."""

            broadcast_impl_value = semantic.broadcast_impl_value

        self._recording = Recording

    def replace(self, name: str, function: Any, builder: Any, semantic: Any) -> Any:
        """Return a function that follows traces. function: a builtin function; semantic: its hidden
        argument."""
        traces: dict[Any, Trace | None] = {}
        follow, key_of = self._follow, self._key_of
        max_tensors = 2 if name == "load" else 3  # a load looks at the value of a third

        def call(*arguments: Any, **options: Any) -> Any:
            options.pop("_semantic", None)
            handles: list[Any] = []
            key = key_of((*arguments, *options.values()), handles)
            if key is None or len(handles) > max_tensors:
                return function(*arguments, **options, _semantic=semantic)
            if options:
                key += tuple(options)
            if key not in traces:
                traces[key], result = self._record(function, builder, arguments, options, handles)
                return result
            trace = traces[key]
            if trace is None:
                return function(*arguments, **options, _semantic=semantic)
            return follow(trace, builder, handles)

        call.__wrapped__ = function  # type: ignore[attr-defined]
        return call

    def _key_of(self, operands: Sequence[Any], handles: list[Any]) -> tuple[Any, ...] | None:
        """Return what a trace depends on, or None if it may depend on more. handles: gets the
        operands' handles."""
        key: tuple[Any, ...] = ()
        for x in operands:
            if type(x) is self._constexpr:
                x = x.value
            kind = type(x)
            if kind is self._tensor and type(x.handle) is self._handle_class:
                handle = x.handle
                data = handle.data
                key += type(x.type), x.dtype.name, handle.dtype.name, data.dtype.num, data.shape
                handles.append(handle)
            elif kind in PLAIN:
                key += kind, x
            elif kind is float:
                key += kind, x.hex()  # -0.0 differs from 0.0
            elif kind is self._dtype:
                key += kind, x.name
            elif kind is list or kind is tuple or kind is self._tuple:
                num_before = len(handles)
                inner = self._key_of(tuple(x), handles)
                if inner is None or len(handles) > num_before:
                    return None
                key += ((inner,),)
            else:
                return None
        return key

    def _record(
        self,
        function: Any,
        builder: Any,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        handles: list[Any],
    ) -> tuple[Trace | None, Any]:
        """Call a function; return its trace, if there is one, and its result."""
        recorder = Recorder(builder, self._handle_class, handles)
        result = function(*arguments, **options, _semantic=self._recording(recorder))
        if not recorder.is_complete or type(result) is not self._tensor:
            return None, result
        handle, nothing = result.handle, result if result.handle is None else None
        value, is_constant = recorder.values.get(id(handle), -1), id(handle) in recorder.constants
        if value < 0 and not is_constant and nothing is None:
            return None, result
        constant = self._copied(handle) if is_constant else None
        attributes = {name: each for name, each in vars(result).items() if name != "handle"}
        return Trace(tuple(recorder.steps), value, constant, nothing, attributes), result

    def _follow(self, trace: Trace, builder: Any, values: list[Any]) -> Any:
        """Return what the traced function returns. values: the operands' handles."""
        handle_class = self._handle_class
        for method, arguments, places in trace.steps:
            filled = [*arguments]
            for at, index in places:
                filled[at] = values[index]
            found = getattr(builder, method)(*filled)
            if type(found) is handle_class:
                values.append(found)
            elif type(found) is tuple:
                values += found
        if trace.nothing is not None:
            return trace.nothing
        handle = values[trace.value] if trace.constant is None else self._copied(trace.constant)
        block = object.__new__(self._tensor)
        block.__dict__ = {**trace.attributes, "handle": handle}
        return block

    def _copied(self, handle: Any) -> Any:
        """Return a handle of the same array, as some operators change the dtype of theirs."""
        copy = object.__new__(self._handle_class)
        copy.data, copy.dtype, copy.attr = handle.data, handle.dtype, {}
        return copy


def _members(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _holds(container: Any, kind: type) -> bool:
    """Return whether a list or tuple holds an object of a kind."""
    return isinstance(container, (list, tuple)) and any(type(each) is kind for each in container)
