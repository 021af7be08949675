"""Planned operators of Triton's interpreter give the same bits and types as the originals."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import IncompatibleTypeErrorImpl
from triton.runtime import interpreter

from benchmarks.gpu.elementwise import FUNCTIONS, OPERATORS
from quire.ops.kernels.launch import INTERPRETED
from tests.support.cases import slow_but

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is no interpreter")

DTYPES = [
    tl.int1, tl.int32, tl.uint32, tl.int64, tl.float16, tl.float32, tl.bfloat16,
    tl.pointer_type(tl.float32),
]  # fmt: skip
SHAPES = [((), ()), ((4,), ()), ((), (4,)), ((4,), (4,)), ((4, 1), (1, 2)), ((4, 1), (2,))]
NUMBERS = [0, 3, -3, 1 << 40, 0.5, True, tl.constexpr(2)]
INVALID = (TypeError, ValueError, AttributeError, AssertionError, IncompatibleTypeErrorImpl)


@pytest.fixture(scope="module")
def originals() -> dict[str, Any]:
    """Return the operators that the planned ones replace, by name."""
    interpreter._patch_lang(None)  # the first launch does so, too
    return interpreter._patch_lang.operators.originals


def make(dtype: Any, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Return a random block, or a scalar for an empty shape."""
    kind = tl.block_type(dtype, list(shape)) if shape else dtype
    data = rng.integers(1, 9, shape or (1,)) * rng.choice([-1, 1])
    array = (data > 0) if dtype == tl.int1 else data.astype(interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(array, dtype), kind)


def outcome(operator: Any, *operands: Any) -> Any:
    """Return the result's types, shape and bits, or the type of the error."""
    try:
        with np.errstate(all="ignore"):
            result = operator(*operands)
    except INVALID as error:
        return type(error)
    if not isinstance(result, tl.tensor):
        return result
    data = result.handle.data
    shape = [size.value for size in result.shape]
    return (
        str(result.type), str(result.dtype), str(result.handle.dtype), shape, result.numel.value,
        data.dtype, data.shape, data.tobytes(),
    )  # fmt: skip


def check(planned: Any, original: Any, *makers: Any) -> None:
    """Compare twice: the first call makes a plan, the second follows it with new operands."""
    for _ in range(2):
        operands = [make() for make in makers]
        assert outcome(planned, *operands) == outcome(original, *operands), (original, operands)


def operand_pairs(rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
    """Yield each pair of types in two pairs of shapes, and each type with numbers."""
    shapes = itertools.cycle(SHAPES)
    for left, right in itertools.product(DTYPES, DTYPES):
        for a, b in itertools.islice(shapes, 2):
            yield lambda left=left, a=a: make(left, a, rng), lambda r=right, b=b: make(r, b, rng)
    for dtype, number in itertools.product(DTYPES, NUMBERS):
        for shape in ((), (4, 2)):
            yield lambda d=dtype, shape=shape: make(d, shape, rng), lambda number=number: number


@pytest.mark.parametrize(
    "name",
    slow_but(
        [*OPERATORS, "maximum", "minimum"],
        *(
            "__add__",
            "__rsub__",
            "__mul__",
            "__truediv__",
            "__mod__",
            "__lt__",
            "__eq__",
            "__and__",
        ),
        *("__rlshift__", "maximum"),
    ),
)
def test_planned_binary_operators_equal_the_originals(name: str, originals: dict[str, Any]) -> None:
    planned = getattr(tl if name in FUNCTIONS else tl.tensor, name)
    for left, right in operand_pairs(np.random.default_rng(0)):
        check(planned, originals[name], left, right)


@pytest.mark.parametrize("shape", [(), (4, 2)])
def test_planned_where_equals_the_original(
    shape: tuple[int, ...], originals: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    for left, right in operand_pairs(rng):
        check(tl.where, originals["where"], lambda: make(tl.int1, shape, rng), left, right)


def test_planned_casts_and_indexing_equal_the_originals(originals: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    for source, shape in itertools.product(DTYPES, ((), (4,), (4, 2))):
        operand = lambda source=source, shape=shape: make(source, shape, rng)  # noqa: E731
        for target in DTYPES:
            check(tl.tensor.to, originals["to"], operand, lambda target=target: target)
        for index in (None, (slice(None), None), (None, slice(None)), (slice(0, 1), None)):
            get = originals["__getitem__"]
            check(tl.tensor.__getitem__, get, operand, lambda index=index: index)


def test_planned_broadcasts_equal_the_originals(originals: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    semantic = interpreter.interpreter_semantic

    def one(function: Any, number: int) -> Any:
        return lambda left, right: function(semantic, left, right)[number]

    for (left, right), number in itertools.product(operand_pairs(rng), (0, 1)):
        if isinstance(right(), tl.tensor):
            original = originals["broadcast_impl_value"]
            planned = type(semantic).broadcast_impl_value
            check(one(planned, number), one(original, number), left, right)
