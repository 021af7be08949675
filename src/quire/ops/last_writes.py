"""Which of several writes to the same places count. No torch."""

import numpy as np
import numpy.typing as npt


def last_writes(destination: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.int32]:
    """Return indices of the last write to each place, ascending."""
    _, from_behind = np.unique(destination[::-1], return_index=True)
    return np.sort(len(destination) - 1 - from_behind).astype(np.int32)
