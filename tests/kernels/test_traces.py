"""Traced functions of Triton's interpreter give the same bits and types as the originals."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

from benchmarks.gpu.traces import TRACED, Traces
from quire.ops.kernels.launch import INTERPRETED
from tests.kernels.test_elementwise import make, outcome

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="there is no interpreter")

SHAPES: list[tuple[int, ...]] = [(), (1,), (4,), (4, 2)]
DTYPES = [tl.int1, tl.int32, tl.float16, tl.float32]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def patched() -> None:
    interpreter._patch_lang(None)  # the first launch does so, too


def original(name: str) -> Callable[..., Any]:
    function = getattr(tl, name).__wrapped__
    semantic = interpreter.interpreter_semantic
    return lambda *operands, **options: function(*operands, **options, _semantic=semantic)


def check(name: str, make_call: Callable[[], Call]) -> None:
    """Compare several calls: the first makes a trace, the others follow it with new operands."""
    for _ in range(4):
        operands, options = make_call()
        wanted = outcome(partial(original(name), **options), *operands)
        found = outcome(partial(getattr(tl, name), **options), *operands)
        assert found == wanted, (name, operands, options)


class Memory:
    """An array of numbers, and blocks of pointers to it."""

    def __init__(self, dtype: Any, rng: np.random.Generator) -> None:
        numpy_dtype = np.int8 if dtype == tl.int1 else interpreter._get_np_dtype(dtype)
        self.array = rng.integers(0, 2 if dtype == tl.int1 else 99, 8).astype(numpy_dtype)
        self._kind = tl.pointer_type(dtype)

    def pointers(self, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
        first, size = self.array.ctypes.data, self.array.itemsize
        places = rng.permutation(8)[: int(np.prod(shape))].reshape(shape or (1,))
        handle = interpreter.TensorHandle((first + size * places).astype(np.uint64), self._kind)
        return tl.tensor(handle, tl.block_type(self._kind, list(shape)) if shape else self._kind)


def masks(shape: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
    """Yield None, and the shapes that are broadcast to this one."""
    yield from (None, ()) if not shape else (None, (), shape)
    if len(shape) == 2:
        yield from ((shape[0], 1), (1, shape[1]))


def some(shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Return a random mask."""
    kind = tl.block_type(tl.int1, list(shape)) if shape else tl.int1
    return tl.tensor(interpreter.TensorHandle(rng.random(shape or (1,)) < 0.5, tl.int1), kind)


OTHERS = [None, 0.0, 7, float("-inf"), tl.constexpr(3), "block"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_traced_loads_equal_the_original(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        for mask, other in itertools.product(masks(shape), OTHERS):
            memory = Memory(dtype, rng)

            def load(
                memory: Any = memory, shape: Any = shape, m: Any = mask, o: Any = other
            ) -> Call:
                value = o
                if o == "block":  # sometimes zero, which a load checks for
                    data = np.full(1, rng.integers(0, 2), interpreter._get_np_dtype(dtype))
                    value = tl.tensor(interpreter.TensorHandle(data, dtype), dtype)
                options = {} if m is None else {"mask": some(m, rng), "other": value}
                return (memory.pointers(shape, rng),), options

            check("load", load)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_traced_stores_equal_the_original(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        for mask, value in itertools.product(masks(shape), (shape, (), 3, 0.5)):
            memory = Memory(dtype, rng)
            for _ in range(4):
                pointers = memory.pointers(shape, rng)
                stored = make(tl.int32, value, rng) if isinstance(value, tuple) else value
                options = {} if mask is None else {"mask": some(mask, rng)}
                found = []
                for store in (original("store"), tl.store):
                    before = memory.array.copy()
                    store(pointers, stored, **options)
                    found.append(memory.array.tobytes())
                    memory.array[:] = before
                assert found[0] == found[1]
                memory.array[:] = rng.integers(0, 99, 8)


@pytest.mark.parametrize("has_sums", [False, True])
@pytest.mark.parametrize("dtype", [tl.float16, tl.float32, tl.int8], ids=str)
def test_traced_products_equal_the_original(dtype: Any, has_sums: bool) -> None:
    rng = np.random.default_rng(0)
    sums = tl.int32 if dtype == tl.int8 else tl.float32

    def product() -> Call:
        options = {"acc": make(sums, (2, 8), rng)} if has_sums else {}
        return (make(dtype, (2, 4), rng), make(dtype, (4, 8), rng)), options

    check("dot", product)


def test_traced_functions_of_shapes_and_numbers_equal_the_originals() -> None:
    rng = np.random.default_rng(0)
    of_a_block: list[tuple[str, tuple[Any, ...]]] = [
        ("trans", ()), ("permute", (1, 0)), ("reshape", (2, 4)), ("reshape", ([8],)),
        ("expand_dims", (1,)), ("exp", ()), ("exp2", ()), ("log", ()), ("log2", ()),
        ("sqrt", ()), ("rsqrt", ()),
    ]  # fmt: skip
    for (name, rest), dtype in itertools.product(of_a_block, DTYPES):
        check(name, lambda d=dtype, rest=rest: ((make(d, (4, 2), rng), *rest), {}))
    for shape in ((1, 2), (4, 1), (4, 2)):
        check("broadcast_to", lambda shape=shape: ((make(tl.int32, shape, rng), (4, 2)), {}))
    for start, end in ((0, 4), (2, 4), (0, 8)):
        check("arange", lambda start=start, end=end: ((start, end), {}))
    for value, dtype in itertools.product((0, 0.0, -0.0, 1, True, float("nan")), DTYPES[1:]):
        check("full", lambda v=value, d=dtype: (([4, tl.constexpr(2)], v, d), {}))
    check("full", lambda: (([4], make(tl.float32, (), rng), tl.float32), {}))


def test_each_program_gets_its_own_index() -> None:
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(3, 2, 1)
    for x, y in itertools.product(range(3), range(2)):
        builder.set_grid_idx(x, y, 0)
        assert [int(tl.program_id(axis)) for axis in range(3)] == [x, y, 0]
        assert [int(tl.num_programs(axis)) for axis in range(3)] == [3, 2, 1]


def test_constant_keeps_its_dtype() -> None:
    """A right shift changes the dtype of its left operand's array."""
    for _ in range(3):
        block = tl.full([4], 8, tl.uint32)
        assert block.handle.data.dtype == np.uint32
        interpreter.interpreter_builder.create_ashr(block.handle, block.handle)


def traced(name: str, function: Callable[..., Any]) -> Any:
    traces, builder = Traces(tl.core, interpreter), interpreter.interpreter_builder
    return traces.replace(name, function, builder, interpreter.interpreter_semantic)


def test_operands_of_known_types_are_checked_once() -> None:
    calls = []

    def counted(*operands: Any, **options: Any) -> Any:
        calls.append(1)
        return tl.exp.__wrapped__(*operands, **options)

    rng, function = np.random.default_rng(0), traced("exp", counted)
    for _ in range(3):
        function(make(tl.float32, (4,), rng))
    assert len(calls) == 1
    function(make(tl.float32, (8,), rng))
    assert len(calls) == 2


def test_functions_that_bypass_the_builder_are_not_traced() -> None:
    def twice(block: Any, _semantic: Any) -> Any:
        handle = interpreter.TensorHandle(block.handle.data * 2, block.dtype)
        handle = _semantic.builder.create_exp(handle)
        return tl.tensor(handle, block.type)

    rng, function = np.random.default_rng(0), traced("exp", twice)
    for _ in range(3):
        block = make(tl.float32, (4,), rng)
        assert np.array_equal(function(block).handle.data, np.exp(2 * block.handle.data))


def test_every_traced_function_is_replaced() -> None:
    assert all(hasattr(getattr(tl, name), "__wrapped__") for name in TRACED)
    assert getattr(tl.core, "load", None).__wrapped__ is tl.load.__wrapped__
