"""Triton's interpreter on a CPU, for tests and where the code of a benchmark is tried out.

Of triton 3.6 is changed what stops it or takes half of its time. It makes loop bounds of arrays
with one element, which numpy 2.4 refuses to take for numbers. It replaces what is in
`triton.language` not only for a launch but again for every call of a function within the kernel. It
describes in words the type of every tuple that is made, which only the compiler asks for, and makes
a table of all dtypes whenever it looks one up.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LanguagePatches:
    """Stands for the interpreter's `_patch_lang`: within a launch each of its modules is patched
    once. patch: what the interpreter has; nothing: makes a scope in which nothing was patched."""

    patch: Any
    modules: tuple[Any, ...]
    nothing: Any
    _launch: Any = None
    _done: set[str] = field(default_factory=set)

    def __call__(self, function: Any) -> Any:
        """What is to be restored after a launch; of a call within it nothing is."""
        values = function.__globals__.values()
        seen = {module.__name__ for module in self.modules if any(v is module for v in values)}
        if self._launch is not None and seen <= self._done:
            return self.nothing()
        scope = self.patch(function)
        self._done |= seen
        if self._launch is None:
            self._launch, restore = scope, scope.restore

            def restore_and_forget() -> None:
                self._launch = None
                self._done.clear()
                restore()

            scope.restore = restore_and_forget
        return scope


def repair_interpreter() -> None:
    """Once per process, before the first launch; does nothing where there is no triton."""
    try:
        import triton.language as tl
        import triton.runtime.interpreter as interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index
    interpreter._patch_lang = LanguagePatches(
        interpreter._patch_lang, (tl, tl.core), interpreter._LangPatchScope
    )
    interpreter._get_np_dtype = remembered(interpreter._get_np_dtype)
    describe_tuples_when_asked(tl.core)


def remembered(find: Any) -> Any:
    """find: numpy's dtype for one of Triton's, of which blocks have their elements'."""
    known: dict[str, Any] = {}

    def look_up(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return look_up


def describe_tuples_when_asked(core: Any) -> None:
    """core: `triton.language.core`."""
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
