"""Streams that run their work as late as possible, or at random times. Work that no event orders
may run in any order, as on a GPU, but repeatably. Also streams that are threads."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from quire.ops.blocks.streams import Int32, Mark, Stream, TaskMark


class LateMark:
    def __init__(self, stream: "LateStream", position: int) -> None:
        self._stream = stream
        self._position = position

    def is_done(self) -> bool:
        return self._stream.num_done >= self._position

    def wait(self) -> None:
        while not self.is_done():
            self._stream.step()


class LateStream:
    """Work that is launched, and begins when somebody waits for it or chance wants it."""

    def __init__(self, streams: "LateStreams") -> None:
        self._streams = streams
        self._work: deque[Callable[[], object]] = deque()
        self.num_done = 0

    @property
    def has_work(self) -> bool:
        return bool(self._work)

    def step(self) -> None:
        self._work.popleft()()
        self.num_done += 1

    def run(self, launch: Callable[[], object]) -> None:
        self._work.append(launch)
        self._streams.go_on()

    def mark(self) -> LateMark:
        return LateMark(self, self.num_done + len(self._work))

    def wait_for(self, mark: Mark) -> None:
        self.run(mark.wait)


class LateStreams:
    """chance: which work is done each time that some is launched; None: none before it must be.
    is_prompt: the compute stream does all at once, for work that is not launched by it.

    A GPU's memory is the host's here. The helper thread is a stream, too.
    """

    def __init__(
        self, chance: np.random.Generator | None = None, *, is_prompt: bool = False
    ) -> None:
        self._is_prompt = is_prompt
        self._chance = chance
        self._every = tuple(LateStream(self) for _ in range(4))
        self._thread = self._every[3]
        self.compute: Stream = self._every[0]
        self.out: Stream = self._every[1]
        self.into: Stream = self._every[2]
        self.num_buffers = 0

    def go_on(self) -> None:
        while self._is_prompt and self._every[0].has_work:
            self._every[0].step()
        if self._chance is None:
            return
        for _ in range(self._chance.integers(4)):
            stream = self._every[self._chance.integers(len(self._every))]
            if stream.has_work:
                stream.step()

    @property
    def num_done(self) -> int:
        """Of all that was launched."""
        return sum(stream.num_done for stream in self._every)

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_buffers += 1
        pinned, staging = (torch.full((num_bytes,), 99, dtype=torch.uint8) for _ in range(2))
        return pinned, staging

    def ids(self, blocks: Int32) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int32)

    def run_task(self, task: Callable[[], None]) -> Mark:
        self._thread.run(task)
        return self._thread.mark()


class ThreadStream:
    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def run(self, launch: Callable[[], object]) -> None:
        self._thread.submit(launch)

    def mark(self) -> TaskMark:
        return TaskMark(self._thread.submit(lambda: None))

    def wait_for(self, mark: Mark) -> None:
        self._thread.submit(mark.wait)


class ThreadStreams:
    """A thread for each stream, which all run at once."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.compute: Stream = ThreadStream()
        self.out: Stream = ThreadStream()
        self.into: Stream = ThreadStream()

    def buffers(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(num_bytes, dtype=torch.uint8), torch.empty(num_bytes, dtype=torch.uint8)

    def ids(self, blocks: Int32) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int32)

    def run_task(self, task: Callable[[], None]) -> Mark:
        return TaskMark(self._thread.submit(task))
