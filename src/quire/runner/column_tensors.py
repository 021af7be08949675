"""The columns that rows sample with, as tensors of a device."""

import torch

from quire.ops.penalties import Penalties
from quire.ops.row_state import RowTensors
from quire.runner.columns import FLOATS, NARROW_COLUMNS, WIDE_COLUMNS


def empty_columns(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make columns of 32 and of 64 bits, of rows that ask for nothing."""
    narrow_CR = torch.zeros(len(NARROW_COLUMNS), num_rows, dtype=torch.int32, device=device)
    narrow_CR[NARROW_COLUMNS.index("edits")] = -1
    wide_CR = torch.zeros(len(WIDE_COLUMNS), num_rows, dtype=torch.int64, device=device)
    return narrow_CR, wide_CR


def narrow(state: RowTensors, name: str) -> torch.Tensor:
    """Return a column of all rows: float32, or int32 for those that are no FLOATS."""
    column_R = state.narrow_CR[NARROW_COLUMNS.index(name)]
    return column_R.view(torch.float32) if name in FLOATS else column_R


def wide(state: RowTensors, name: str) -> torch.Tensor:
    """Return a column of all rows, int64."""
    return state.wide_CR[WIDE_COLUMNS.index(name)]


def penalties_of(state: RowTensors, rows_N: torch.Tensor) -> Penalties:
    """Return the penalties of these rows."""
    names = ("presence", "frequency", "repetition")
    return Penalties(*(narrow(state, name).index_select(0, rows_N) for name in names))
