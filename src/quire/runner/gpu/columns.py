"""What rows sample with, as columns on a GPU, and the deltas that set them when a row starts."""

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import RowStart
from quire.ops.kernels.row_deltas import COMPUTED, NARROW, WIDE
from quire.ops.kernels.sampling import SamplingColumns
from quire.ops.kernels.step_inputs import RowTensors
from quire.ops.penalties import Penalties
from quire.runner.sampling_facts import FLOATS, INTEGERS, sampling_numbers

Int32 = npt.NDArray[np.int32]

NARROW_COLUMNS = (*FLOATS, "edits", "penalised")  # the row's place among edits, or -1; 0 or 1
WIDE_COLUMNS = INTEGERS
PROMPT_COLUMN = WIDE_COLUMNS.index("num_prompt_tokens")

_KINDS = (COMPUTED, *[NARROW] * len(NARROW_COLUMNS), *[WIDE] * (2 * len(WIDE_COLUMNS)))
_INDICES = (0, *range(len(NARROW_COLUMNS)), *range(2 * len(WIDE_COLUMNS)))


def start_deltas(start: RowStart, edits: int) -> Int32:
    """[K, 4], as `row_deltas` has them. edits: the row's place among edits, or -1."""
    floats, wide = sampling_numbers(start, greedy_temperature=0.0)
    deltas = np.empty((len(_KINDS), 4), np.int32)
    deltas[:, 0], deltas[:, 1], deltas[:, 2] = _KINDS, start.row, _INDICES
    deltas[0, 3] = start.num_computed_tokens
    deltas[1 : 1 + len(FLOATS), 3] = np.array(floats, np.float32).view(np.int32)
    narrow = 1 + len(NARROW_COLUMNS)
    deltas[1 + len(FLOATS) : narrow, 3] = edits, start.params.has_penalties
    deltas[narrow:, 3] = np.array(wide, np.int64).view(np.int32)
    return deltas


def wide_deltas(row: int, name: str, value: int) -> list[tuple[int, int, int, int]]:
    """Two deltas that set a column of 64 bits."""
    lower, upper = np.array([value], np.int64).view(np.int32).tolist()
    at = 2 * WIDE_COLUMNS.index(name)
    return [(WIDE, row, at, lower), (WIDE, row, at + 1, upper)]


def empty_columns(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of 32 and of 64 bits, of rows that ask for nothing."""
    narrow_CR = torch.zeros(len(NARROW_COLUMNS), num_rows, dtype=torch.int32, device=device)
    narrow_CR[NARROW_COLUMNS.index("edits")] = -1
    wide_CR = torch.zeros(len(WIDE_COLUMNS), num_rows, dtype=torch.int64, device=device)
    return narrow_CR, wide_CR


def narrow(state: RowTensors, name: str) -> torch.Tensor:
    """A column of all rows: float32, or int32 for those that are no FLOATS."""
    column_R = state.narrow_CR[NARROW_COLUMNS.index(name)]
    return column_R.view(torch.float32) if name in FLOATS else column_R


def wide(state: RowTensors, name: str) -> torch.Tensor:
    """A column of all rows, int64."""
    return state.wide_CR[WIDE_COLUMNS.index(name)]


def sampling_columns(state: RowTensors) -> SamplingColumns:
    """Views, as the sampling kernel reads them."""
    return SamplingColumns(
        temperature=narrow(state, "temperature"),
        top_k=wide(state, "top_k"),
        top_p=narrow(state, "top_p"),
        min_p=narrow(state, "min_p"),
        seeds=wide(state, "seed"),
        sample_index=wide(state, "sample_index"),
    )


def penalties_of(state: RowTensors, rows_N: torch.Tensor) -> Penalties:
    """Of these rows."""
    names = ("presence", "frequency", "repetition")
    return Penalties(*(narrow(state, name).index_select(0, rows_N) for name in names))
