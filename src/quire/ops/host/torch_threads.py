"""How many threads torch's own operations have beside the C++ core.

Both wait for work with threads that do not sleep at once. Where the two take turns within a step,
torch's threads keep the cores that the core's need: steps of a mixture of experts took eight times
as long so (docs/inside/cpu.md).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let torch compute with so many threads; None: with as many as it has."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
