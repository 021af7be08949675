"""Memory of large results that is used again. No torch.

An allocator gives memory of more than 32 MB back to the system as soon as it is free, and what is
new again is made of pages, one fault each: of 64 rows' logits that is a third of their product.
"""

import sys
import threading

import numpy as np
import numpy.typing as npt

LARGE = 16 << 20  # bytes
ALIGNMENT = 64
UNUSED = 3  # references to an array while it is looked at: the list's, the loop's, the call's

Bytes = npt.NDArray[np.uint8]


class SpareMemory:
    """Arrays that were given away, each free again when nothing refers to it or a part of it."""

    def __init__(self) -> None:
        self._arrays: list[Bytes] = []
        self._lock = threading.Lock()

    def empty(self, num_bytes: int) -> Bytes:
        """Return so many bytes, with anything in them, at a multiple of 64. Small ones are new."""
        if num_bytes < LARGE:
            return np.empty(num_bytes, np.uint8)
        with self._lock:
            free = [each for each in self._arrays if sys.getrefcount(each) == UNUSED]
            found = next((each for each in free if len(each) >= num_bytes + ALIGNMENT), None)
            if found is None:  # those that are free are too small for what is asked for now
                self._arrays = [each for each in self._arrays if not _is_among(each, free)]
                found = np.empty(num_bytes + ALIGNMENT, np.uint8)
                self._arrays.append(found)
            first = -found.ctypes.data % ALIGNMENT
            return found[first : first + num_bytes]


def _is_among(array: Bytes, others: list[Bytes]) -> bool:
    return any(each is array for each in others)


SPARE = SpareMemory()  # of the process
