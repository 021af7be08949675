"""Triton's interpreter on a CPU, for tests and for dry runs of benchmarks.

This changes the parts of triton 3.6 that fail or take two thirds of its time.

- Loop bounds are arrays with one element, which numpy 2.4 does not convert to numbers. - Triton
replaces the members of `triton.language` for every launch and every call within a kernel. Here they
stay replaced, since a process that interprets kernels compiles none. - It describes the type of
every tuple and block in words, which only the compiler needs. It makes a table of all dtypes for
every look-up. - It checks the operands of every load, store and product again. - It checks sums and
products for overflow, which it reports only with `debug`. - It checks and wraps the shape of every
block again. - It computes the exclusive or, by which it sorts, number by number.
"""

import functools
import inspect
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.gpu.elementwise import Elementwise
from benchmarks.gpu.traces import TRACED, Traces


@dataclass
class LanguagePatches:
    """Stands for `_patch_lang` of the interpreter: patches modules once, and leaves them so. patch:
    what the interpreter has; operators: what replaces its operators; nothing: what is to be
    restored."""

    patch: Any
    modules: tuple[Any, ...]
    operators: Elementwise
    nothing: Any
    _is_done: bool = False

    def __call__(self, function: Any) -> Any:
        if not self._is_done:
            self._is_done = True
            self.patch(SimpleNamespace(__globals__=dict(enumerate(self.modules))))
            self.operators.replace(self.modules)
        return self.nothing


def repair_interpreter() -> None:
    """Repair it before the first launch; do nothing again, or where there is no triton."""
    try:
        import triton.language as tl
        import triton.runtime.interpreter as interpreter
    except ImportError:
        return
    if isinstance(interpreter._patch_lang, LanguagePatches):
        return
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index
    interpreter._patch_lang = LanguagePatches(
        interpreter._patch_lang,
        (tl, tl.core),
        Elementwise(tl.core, interpreter),
        interpreter._LangPatchScope(),
    )
    traces = Traces(tl.core, interpreter)
    interpreter._patch_attr = with_semantic(interpreter.TritonSemantic, traces)
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.ReduceOps.apply_impl = exclusive_or_at_once(
        interpreter.ReduceOps.apply_impl, tl.standard._xor_combine
    )
    describe_tuples_lazily(tl.core)
    shape_blocks_once(tl.core)
    interpreter.inspect = RememberedSignatures()


class RememberedSignatures:
    """Stands for `inspect` in the interpreter, which takes a kernel's signature at every launch."""

    def __init__(self) -> None:
        self.getfullargspec = functools.cache(inspect.getfullargspec)
        self._signature = functools.cache(inspect.signature)

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    def getcallargs(self, function: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        bound = self._signature(function).bind(*arguments, **options)
        bound.apply_defaults()
        return bound.arguments


def with_semantic(make: Any, traces: Traces) -> Any:
    """Return a patch of functions. make: returns their hidden arguments for a builder."""

    def patch(module: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        semantic, function = make(builder), getattr(member, "__wrapped__", member)

        def call(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*arguments, **options)

        is_traced = name in TRACED
        traced = traces.replace(name, function, builder, semantic) if is_traced else call
        scope.set_attr(module, name, traced)

    return patch


def remembered(find: Any) -> Any:
    """Cache a look-up. find: returns numpy's dtype for Triton's; a block has its elements' one."""
    known: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return look_up


def exclusive_or_at_once(apply: Any, combine: Any) -> Any:
    """Return a reduction that computes the exclusive or at once. apply: the interpreter's
    reduction."""

    def reduce(self: Any, blocks: Any) -> Any:
        if self.combine_fn is not combine:
            return apply(self, blocks)
        [block] = blocks
        found = np.bitwise_xor.reduce(block.handle.data, self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, block.dtype)

    return reduce


def describe_tuples_lazily(core: Any) -> None:
    """Describe tuples' types only on request. core: `triton.language.core`."""
    make, describe = core.tuple.__init__, core._type_for_tuple_values

    def without_type(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make(self, args, type)

    def type_of(self: Any) -> Any:
        if "_type" not in self.__dict__:
            self._type = describe(self.values)
        return self._type

    core.tuple.__init__ = without_type
    core.tuple.type = property(type_of, lambda self, type: setattr(self, "_type", type))


def shape_blocks_once(core: Any) -> None:
    """Wrap each shape of blocks once. Shapes are powers of two, so a process has few. core:
    `triton.language.core`."""
    scalar = core.constexpr(1), core.tuple(())
    # By shape: of blocks' types (numbers) and of blocks (constexpr), and how many elements.
    known: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        plain = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        if plain not in known:
            if not plain:
                raise TypeError("0d block_type is forbidden")
            numel = core.constexpr(core.validate_block_shape(plain))
            sizes = core.tuple([core.constexpr(size) for size in plain])
            known[plain] = core.tuple(plain), sizes, numel
        self.element_ty = element_ty
        self.shape, self.sizes, self.count = known[plain]
        self.numel = self.count.value

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = (type.count, type.sizes) if type.is_block() else scalar

    core.tensor.__init__ = make_tensor
    core.block_type.__init__ = make_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
