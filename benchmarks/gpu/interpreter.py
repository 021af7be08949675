"""Triton's interpreter on a CPU, where the code of a benchmark is tried out.

The interpreter makes loop bounds of arrays with one element, which numpy 2.4 refuses to take for
numbers; it is told how to read them.
"""

from typing import Any


def repair_interpreter() -> None:
    """Once per process, before the first launch; does nothing where there is no triton."""
    try:
        import triton.runtime.interpreter as interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor

    def with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = with_index
