"""Reuse of the memory of large results. This module does not import torch.

An allocator returns memory of more than 32 MB to the system as soon as it is free. New memory costs
one fault per page: for 64 rows' logits, a third of the time of their product.
"""

import sys
import threading

import numpy as np
import numpy.typing as npt

LARGE = 16 << 20  # bytes
ALIGNMENT = 64
UNUSED = 3  # references to an unused array: the list's, the loop's, the call's

Bytes = npt.NDArray[np.uint8]


class SpareMemory:
    """Pool of arrays. An array is free again when no reference to it or to a part of it is left."""

    def __init__(self) -> None:
        self._arrays: list[Bytes] = []
        self._lock = threading.Lock()

    def empty(self, num_bytes: int) -> Bytes:
        """Return uninitialised bytes [num_bytes] at a multiple of 64. Small arrays are new."""
        if num_bytes < LARGE:
            return np.empty(num_bytes, np.uint8)
        with self._lock:
            free = [each for each in self._arrays if sys.getrefcount(each) == UNUSED]
            found = next((each for each in free if len(each) >= num_bytes + ALIGNMENT), None)
            if found is None:  # all free arrays are too small: drop them
                self._arrays = [each for each in self._arrays if not _is_among(each, free)]
                found = np.empty(num_bytes + ALIGNMENT, np.uint8)
                self._arrays.append(found)
            first = -found.ctypes.data % ALIGNMENT
            return found[first : first + num_bytes]


def _is_among(array: Bytes, others: list[Bytes]) -> bool:
    return any(each is array for each in others)


SPARE = SpareMemory()  # shared by the whole process
