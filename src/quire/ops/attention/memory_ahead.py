"""Memory of blocks that the system has handed out before the blocks are used.

A page costs most when it is written for the first time. On a virtual machine that gives free memory
back to its host that was 2.3 ms per MB, where reading, checking and copying a block took 0.7, and
0.09 where the machine had the memory at hand. Who fetches blocks for a request that waits has the
pages of the next ones handed out meanwhile, on a thread that takes a quarter of a core at most.

The system fills new pages with zeros and leaves those alone that are there (MADV_POPULATE_WRITE,
Linux 5.14), so nobody need wait for it. Without it nothing is done. The thread ends with the main
one, which waits for that: a daemon would hold on to modules that are to be taken down.
"""

import math
import threading
import time

import torch

from quire.ops.pages import populate

PIECE_BYTES = 4 << 20
REST = 3  # times as long as a piece took


class MemoryAhead:
    """Has the memory of a tensor's blocks handed out, so many bytes ahead of the last block that
    was used. dim: counts the blocks, which are used in the order of their numbers at first."""

    def __init__(self, blocks: torch.Tensor, dim: int, ahead_bytes: int) -> None:
        self._blocks, self._dim = blocks, dim
        self._num_blocks = blocks.shape[dim]
        self._num_ahead = max(1, ahead_bytes * self._num_blocks // max(1, blocks.nbytes))
        self._asked = 0  # for all blocks before this one
        self._lock = threading.Lock()  # guards it
        self._has_ended = False

    def use(self, block: int) -> None:
        """Take note that this block is used. From any thread."""
        if block + self._num_ahead // 2 < self._asked or self._asked == self._num_blocks:
            return
        with self._lock:
            first = self._asked
            self._asked = max(first, min(self._num_blocks, block + 1 + self._num_ahead))
            last = self._asked
        if first < last:
            name = "quire-memory"
            threading.Thread(target=self._hand_out, args=(first, last), name=name).start()

    def end(self) -> None:
        self._has_ended = True

    def _hand_out(self, first: int, last: int) -> None:
        """Have these blocks' memory handed out; they are a piece of each of the tensor's parts."""
        shape, base = self._blocks.shape, self._blocks.data_ptr()
        block_bytes = math.prod(shape[self._dim + 1 :]) * self._blocks.element_size()
        for part in range(math.prod(shape[: self._dim])):
            begin = base + (part * self._num_blocks + first) * block_bytes
            end = begin + (last - first) * block_bytes
            for start in range(begin, end, PIECE_BYTES):
                began = time.perf_counter()
                if self._has_ended or not threading.main_thread().is_alive():
                    return
                if not populate(start, min(PIECE_BYTES, end - start)):
                    return
                time.sleep(REST * (time.perf_counter() - began))
