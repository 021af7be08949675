"""What rows sample with: columns of their state, and the deltas that set them when a row starts. No
torch."""

import numpy as np
import numpy.typing as npt

from quire.base.plan import RowStart
from quire.ops.row_arrays import COMPUTED, NARROW, WIDE

Int32 = npt.NDArray[np.int32]

FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
NARROW_COLUMNS = (*FLOATS, "edits", "penalised")  # the row's place among edits, or -1; 0 or 1
WIDE_COLUMNS = ("top_k", "seed", "sample_index", "num_prompt_tokens")
PROMPT_COLUMN = WIDE_COLUMNS.index("num_prompt_tokens")

_KINDS = (COMPUTED, *[NARROW] * len(NARROW_COLUMNS), *[WIDE] * (2 * len(WIDE_COLUMNS)))
_INDICES = (0, *range(len(NARROW_COLUMNS)), *range(2 * len(WIDE_COLUMNS)))


def start_deltas(start: RowStart, edits: int) -> Int32:
    """Return [K, 4] that start a row. edits: the row's place among edits, or -1. Temperature 0 is
    the greedy choice."""
    params = start.params
    floats = (
        0.0 if params.is_greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    seed = (start.seed + 2**63) % 2**64 - 2**63  # any 64 bits, as a signed number
    wide = (max(params.top_k, 0), seed, start.sample_index, start.num_prompt_tokens)
    deltas = np.empty((len(_KINDS), 4), np.int32)
    deltas[:, 0], deltas[:, 1], deltas[:, 2] = _KINDS, start.row, _INDICES
    deltas[0, 3] = start.num_computed_tokens
    deltas[1 : 1 + len(FLOATS), 3] = np.array(floats, np.float32).view(np.int32)
    narrow_end = 1 + len(NARROW_COLUMNS)
    deltas[1 + len(FLOATS) : narrow_end, 3] = edits, params.has_penalties
    deltas[narrow_end:, 3] = np.array(wide, np.int64).view(np.int32)
    return deltas


def wide_deltas(row: int, name: str, value: int) -> list[tuple[int, int, int, int]]:
    """Return two deltas that set a column of 64 bits."""
    lower, upper = np.array([value], np.int64).view(np.int32).tolist()
    at = 2 * WIDE_COLUMNS.index(name)
    return [(WIDE, row, at, lower), (WIDE, row, at + 1, upper)]


def edits_delta(row: int) -> tuple[int, int, int, int]:
    """Return the delta that gives the row a place among edits."""
    return NARROW, row, NARROW_COLUMNS.index("edits"), row
