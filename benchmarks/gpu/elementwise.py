"""Faster elementwise operators for Triton's interpreter.

The interpreter derives the types of every `a + b` again: promotion, casts, broadcasting. That takes
ten times as long as numpy's part. Here each operator is derived once for each combination of
operand types (and values of Python numbers). The first call runs the interpreter's own code and
records what it passes to numpy. The plan that comes of it is kept only if it gives the same bits.
Later calls with such operands run numpy alone, which broadcasts by the same rules as Triton.

The operators must be replaced after the interpreter has patched `triton.language`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

OPERATORS = [
    *(f"__{r}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")
      for r in ("", "r")),
    *(f"__{r}{name}__" for name in ("and", "or", "xor", "lshift", "rshift") for r in ("", "r")),
    *(f"__{name}__" for name in ("lt", "le", "gt", "ge", "eq", "ne")),
]  # fmt: skip
FUNCTIONS = ("maximum", "minimum", "where")
# Types that numpy lacks: their arrays hold bits, so `astype` is no cast.
BITS = ("bf16", "fp8e5", "fp8e5b16", "fp8e4nv", "fp8e4b8", "fp8e4b15")


class Plan(NamedTuple):
    """How numpy computes one operator for one combination of operand types."""

    compute: Callable[..., Any]
    arguments: tuple[tuple[int, Any, Any], ...]  # operand's index, constant or None, cast or None
    array_dtype: Any  # numpy's dtype of the result
    handle_dtype: Any  # Triton's dtype of the result's handle, which differs for comparisons
    attributes: dict[str, Any]  # of the result, but for its handle


class Elementwise:
    """Replaces the operators of `triton.language`. interpreter: `triton.runtime.interpreter`."""

    def __init__(self, core: Any, interpreter: Any) -> None:
        self._core, self._interpreter = core, interpreter
        self.originals: dict[str, Any] = {}  # what is replaced, by name
        self._calls: list[tuple[Any, tuple[Any, ...]]] | None = None  # while recording

    def replace(self, modules: tuple[Any, ...]) -> None:
        """Replace the operators. modules: `triton.language` and its modules that kernels see."""
        self._record_builder(self._interpreter.InterpreterBuilder)
        tensor, semantic = self._core.tensor, self._interpreter.TritonSemantic
        for name in OPERATORS:
            self._replace(tensor, name, lambda f, name=name: self._planned(f, is_reversed(name)))
        for module in modules:
            for name in FUNCTIONS:
                self._replace(module, name, lambda f: self._planned(f, False))
        self._replace(tensor, "to", self._planned_cast)
        self._replace(tensor, "__getitem__", self._planned_index)
        self._replace(semantic, "broadcast_impl_value", self._planned_broadcast)
        self._replace(semantic, "to_tensor", self._unchanged_tensors)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self.originals[name] = getattr(owner, name)
        setattr(owner, name, make(self.originals[name]))

    def _record_builder(self, builder: Any) -> None:
        """Let the builder's methods note which arrays they pass to which function of numpy."""
        binary, ternary = builder.binary_op, builder.ternary_op
        divide, add_pointer = builder.create_idiv, builder.create_addptr

        def binary_op(self_: Any, lhs: Any, rhs: Any, op: Any) -> Any:
            self._note(op, lhs, rhs)
            return binary(self_, lhs, rhs, op)

        def ternary_op(self_: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
            self._note(op, lhs, rhs, other)
            return ternary(self_, lhs, rhs, other, op)

        def create_idiv(self_: Any, lhs: Any, rhs: Any) -> Any:
            self._note(divide_towards_zero, lhs, rhs)
            return divide(self_, lhs, rhs)

        def create_addptr(self_: Any, ptr: Any, offset: Any) -> Any:
            size = max(1, ptr.get_element_ty().primitive_bitwidth // 8)
            self._note(pointer_sum(size), ptr, offset)
            return add_pointer(self_, ptr, offset)

        builder.binary_op, builder.ternary_op = binary_op, ternary_op
        builder.create_idiv, builder.create_addptr = create_idiv, create_addptr

    def _note(self, compute: Any, *handles: Any) -> None:
        if self._calls is not None:
            self._calls.append((compute, tuple(handle.data for handle in handles)))

    def _planned(self, operator: Any, is_reversed: bool) -> Any:
        """Return an operator that plans its work. operator: the interpreter's own. is_reversed: its
        first operand is the right one."""
        plans: dict[Any, Plan | None] = {}
        tensor, constexpr = self._core.tensor, self._core.constexpr
        new = object.__new__
        handle_class = self._interpreter.TensorHandle

        def apply(*operands: Any, **options: Any) -> Any:
            key: Any = ()
            for x in operands:
                if type(x) is constexpr:
                    x = x.value
                if type(x) is tensor:
                    handle = x.handle
                    data = handle.data
                    key += (
                        type(x.type), x.dtype.name, handle.dtype.name, data.dtype.num, data.shape,
                    )  # fmt: skip
                elif type(x) is int or type(x) is float or type(x) is bool:
                    key += (type(x), x)
                else:
                    return operator(*operands, **options)
            plan = plans.get(key, missing)
            if options or plan is None:
                return operator(*operands, **options)
            if plan is missing:
                plans[key], result = self._derive(operator, operands, is_reversed)
                return result
            found = plan.compute(
                *[
                    constant if constant is not None
                    else operands[index].handle.data if cast is None
                    else operands[index].handle.data.astype(cast)
                    for index, constant, cast in plan.arguments
                ]
            )  # fmt: skip
            handle = new(handle_class)
            handle.data = (
                found if found.dtype is plan.array_dtype else found.astype(plan.array_dtype)
            )
            handle.dtype = plan.handle_dtype
            handle.attr = {}
            result = new(tensor)
            result.__dict__ = {**plan.attributes, "handle": handle}
            return result

        missing: Any = object()
        return apply

    def _derive(
        self, operator: Any, operands: tuple[Any, ...], is_reversed: bool
    ) -> tuple[Plan | None, Any]:
        """Return a plan, or None where one function of numpy does not do, and the result."""
        tensor = self._core.tensor
        given = [x.handle.data if isinstance(x, tensor) else None for x in operands]
        self._calls = []
        try:
            result = operator(*operands)
            calls = self._calls
        finally:
            self._calls = None
        if len(calls) != 1 or type(result) is not tensor:
            return None, result
        [(compute, arrays)] = calls
        order = list(range(len(operands)))
        if is_reversed:
            order.reverse()
        if isinstance(compute, pointer_sum) and not self._is_pointer(operands[order[0]]):
            order.reverse()
        arguments, scalars = [], [result.dtype.name]
        for index, array in zip(order, arrays, strict=True):
            data = given[index]
            if data is None:
                arguments.append((index, array.ravel()[:1].copy(), None))
            else:
                scalars.append(operands[index].dtype.name)
                arguments.append((index, None, array.dtype if array.dtype != data.dtype else None))
        if any(cast is not None for *_, cast in arguments) and any(s in BITS for s in scalars):
            return None, result
        expected = result.handle.data
        found = compute(
            *[
                constant
                if constant is not None
                else given[index].astype(cast or given[index].dtype)
                for index, constant, cast in arguments
            ]
        ).astype(expected.dtype)
        if found.shape != expected.shape or found.tobytes() != expected.tobytes():
            return None, result
        attributes = {k: v for k, v in vars(result).items() if k != "handle"}
        plan = Plan(compute, tuple(arguments), expected.dtype, result.handle.dtype, attributes)
        return plan, result

    def _is_pointer(self, operand: Any) -> bool:
        return isinstance(operand, self._core.tensor) and operand.dtype.is_ptr()

    def _planned_cast(self, cast: Any) -> Any:
        """Return a cast that plans its work. cast: `tensor.to`, which still casts types that numpy
        lacks."""
        plain = {"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "fp16",
                 "fp32"}  # fmt: skip
        by_key: dict[Any, Any] = {}
        tensor, handle_class = self._core.tensor, self._interpreter.TensorHandle

        def to(x: Any, dtype: Any, *arguments: Any, **options: Any) -> Any:
            dtype = getattr(dtype, "value", dtype)
            if arguments or options or x.dtype.name not in plain or dtype.name not in plain:
                return cast(x, dtype, *arguments, **options)
            if x.dtype.name == dtype.name:
                return x
            if x.dtype.name == "fp16" and dtype.name != "fp32":  # goes through float32
                return cast(x, dtype)
            key = type(x.type), x.dtype.name, x.handle.data.shape, dtype.name
            if key not in by_key:
                by_key[key] = result = cast(x, dtype)
                return result
            like = by_key[key]
            result = object.__new__(tensor)
            handle = handle_class(x.handle.data.astype(like.handle.data.dtype), like.handle.dtype)
            result.__dict__ = {**vars(like), "handle": handle}
            return result

        return to

    def _planned_index(self, index: Any) -> Any:
        """Return an index that plans its work. index: `tensor.__getitem__`, which only adds
        dimensions."""
        known: dict[Any, dict[str, Any]] = {}
        tensor, handle_class = self._core.tensor, self._interpreter.TensorHandle
        block_type, everything = self._core.block_type, slice(None)

        def get(x: Any, slices: Any) -> Any:
            is_plain = type(slices) is tuple and type(x.type) is block_type
            if not is_plain or not all(each is None or each == everything for each in slices):
                return index(x, slices)
            key = x.dtype.name, x.handle.data.shape, tuple(each is None for each in slices)
            if key not in known:
                result = index(x, slices)
                known[key] = vars(result)
                return result
            result = object.__new__(tensor)
            handle = handle_class(x.handle.data[slices], x.handle.dtype)
            result.__dict__ = {**known[key], "handle": handle}
            return result

        return get

    def _planned_broadcast(self, broadcast: Any) -> Any:
        """Return a broadcast that plans its work. broadcast: `broadcast_impl_value`, which gives
        two tensors one shape."""
        known: dict[Any, tuple[Any, Any]] = {}
        tensor, handle_class = self._core.tensor, self._interpreter.TensorHandle

        def give_shape(x: Any, like: Any) -> Any:
            data = np.empty(like.handle.data.shape, like.handle.data.dtype)
            data[...] = x.handle.data
            result = object.__new__(tensor)
            result.__dict__ = {**vars(like), "handle": handle_class(data, like.handle.dtype)}
            return result

        def apply(semantic: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
            if lhs.shape is rhs.shape:  # `shape_blocks_once` makes one object for each shape
                return lhs, rhs
            a, b = lhs.handle, rhs.handle
            key = (
                type(lhs.type), lhs.dtype.name, a.dtype.name, a.data.dtype.num, a.data.shape,
                type(rhs.type), rhs.dtype.name, b.dtype.name, b.data.dtype.num, b.data.shape,
            )  # fmt: skip
            if key not in known:
                left, right = broadcast(semantic, lhs, rhs)
                known[key] = left if left is not lhs else None, right if right is not rhs else None
                return left, right
            left, right = known[key]
            return (
                lhs if left is None else give_shape(lhs, left),
                rhs if right is None else give_shape(rhs, right),
            )

        return apply

    def _unchanged_tensors(self, to_tensor: Any) -> Any:
        tensor = self._core.tensor

        def apply(semantic: Any, x: Any, check_type: bool = True) -> Any:
            return x if type(x) is tensor else to_tensor(semantic, x, check_type)

        return apply


def is_reversed(name: str) -> bool:
    return name.startswith("__r") and name != "__rshift__"


def divide_towards_zero(lhs: Any, rhs: Any) -> Any:
    return (lhs - np.fmod(lhs, rhs)) // rhs


class pointer_sum:
    """Adds offsets to addresses. size: of an element in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, addresses: Any, offsets: Any) -> Any:
        return addresses + self.size * offsets.astype(np.uint64)
