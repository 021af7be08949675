"""Threads for work on texts that takes too long for an event loop.

Short work is done on the loop itself. Longer work has threads of its own, and the longest another
one, so that nobody waits behind a text much longer than his own. In a lane it is done in the order
of coming. How much may be there at once is bounded: texts take memory while they are worked on.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from quire.base.errors import EngineBusy

P = ParamSpec("P")
T = TypeVar("T")

# Shorter texts are worked on at once: below this it takes a few milliseconds at most.
MAX_CHARS_ON_LOOP = 4096
MAX_CHARS_SHORT = 1 << 18
NUM_SHORT_THREADS = 2
# Of all that is worked on or waits.
MAX_OPEN_CHARS = 1 << 26
MAX_OPEN = 1024


class Lanes:
    """num_open, num_open_chars: what is worked on or waits. max_open_chars: what may be; who
    brings more is sent away, unless he is alone."""

    def __init__(self, max_open_chars: float = MAX_OPEN_CHARS, max_open: float = MAX_OPEN) -> None:
        self._max_open_chars = max_open_chars
        self._max_open = max_open
        self._lock = threading.Lock()
        self._short = ThreadPoolExecutor(NUM_SHORT_THREADS, "text")
        self._long = ThreadPoolExecutor(1, "long-text")
        self.num_open = 0
        self.num_open_chars = 0

    async def run(
        self, num_chars: int, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Do work on a text of so many characters. Raises what the work raises, and EngineBusy
        where too much is there already."""
        if num_chars <= MAX_CHARS_ON_LOOP:
            return work(*args, **kwargs)
        self._open(num_chars)
        lane = self._short if num_chars <= MAX_CHARS_SHORT else self._long
        future: Future[T] = lane.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._close(num_chars))  # also if nobody waits any more
        return await asyncio.wrap_future(future)

    def _open(self, num_chars: int) -> None:
        with self._lock:
            is_full = self.num_open_chars + num_chars > self._max_open_chars
            if self.num_open and (is_full or self.num_open >= self._max_open):
                raise EngineBusy(
                    f"{self.num_open} long prompts with {self.num_open_chars} characters are being"
                    " processed or waiting; try again later."
                )
            self.num_open += 1
            self.num_open_chars += num_chars

    def _close(self, num_chars: int) -> None:
        with self._lock:
            self.num_open -= 1
            self.num_open_chars -= num_chars
