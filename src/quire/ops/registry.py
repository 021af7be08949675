"""Marks functions as operations, and records which ones a forward pass calls.

Everything that a model computes goes through operations (views excepted); so the record of one
forward pass is the complete list of what a device must do for it.
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
    """One call: the operation's name and the shapes of its tensor arguments, in order.

    args, kwargs and result are what was passed and returned, if values are kept.
    """

    name: str
    shapes: tuple[Shape, ...]
    args: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    kwargs: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    result: Any = field(default=None, compare=False, repr=False)


@dataclass
class OpRecord:
    """The calls made while recording. `depth` is above 0 while an operation runs."""

    keeps_values: bool = False
    calls: list[OpCall] = field(default_factory=list)
    depth: int = 0

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    def run(self, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the function; note it unless another operation called it."""
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
    """Record the operations called in this context (by this thread or task).

    keeps_values: with arguments and results, which are kept alive so.
    """
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
