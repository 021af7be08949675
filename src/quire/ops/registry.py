"""Registry of operations: `op` marks a function as an operation, `record_ops` records the calls.

A model computes only through operations (apart from views). So the record of a forward pass is the
complete list of the device's work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from quire.ops.weights.opaque import OpaqueWeight

P = ParamSpec("P")
T = TypeVar("T")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpCall:
    """Recorded call: the operation's name and the shapes of its tensor arguments, in order. args,
    kwargs, result: arguments and result of the call, if the record keeps values."""

    name: str
    shapes: tuple[Shape, ...]
    args: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    kwargs: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    result: Any = field(default=None, compare=False, repr=False)


@dataclass
class OpRecord:
    """Calls made during a recording. `depth` is the number of operations that are running now."""

    keeps_values: bool = False
    calls: list[OpCall] = field(default_factory=list)
    depth: int = 0

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def run(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function and record the call, unless another operation is running."""
        call = OpCall(name, _shapes(args, kwargs))
        self.depth += 1
        try:
            result = function(*args, **kwargs)
        finally:
            self.depth -= 1
        if self.depth == 0:
            if self.keeps_values:
                call = replace(call, args=args, kwargs=kwargs, result=result)
            self.calls.append(call)
        return result


_record: ContextVar[OpRecord | None] = ContextVar("quire_op_record", default=None)


def op(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Mark a function (or a method of an attention backend) as the operation `name`."""

    def mark(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            record = _record.get()
            if record is None:
                return function(*args, **kwargs)
            result: T = record.run(name, function, args, kwargs)
            return result

        return call

    return mark


@contextmanager
def record_ops(keeps_values: bool = False) -> Iterator[OpRecord]:
    """Record the operations that this thread or task calls in the context. keeps_values: whether to
    keep arguments and results, which holds their memory."""
    record = OpRecord(keeps_values)
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Shape, ...]:
    values = (*args, *kwargs.values())
    tensors = (value for value in values if isinstance(value, torch.Tensor | OpaqueWeight))
    return tuple(tuple(tensor.shape) for tensor in tensors)
