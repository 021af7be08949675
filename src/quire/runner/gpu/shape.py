"""How large a step is, on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """New tokens and context of each place for a row, which are upper bounds of what the device
    has; num_samples: rows that sample."""

    query_lens: Int32
    context_lens: Int32
    num_samples: int

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())
