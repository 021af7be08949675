"""How many Python functions are called: what a test counts where it may not measure time."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Calls = Counter[tuple[str, str]]  # by file and function


@contextmanager
def counted_calls() -> Iterator[Calls]:
    """Count the calls on this thread."""
    found: Calls = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            found[frame.f_code.co_filename, frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
