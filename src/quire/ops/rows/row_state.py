"""State of the rows on a device, and its updates by torch's operations.

Deltas are defined in `row_arrays.py`, which does the same with arrays, without torch. On a GPU with
triton, `kernels/row_deltas.py` and `kernels/step_inputs.py` do the same in one launch.

Shape legend: R rows, M tokens a row can hold, G cache groups, L blocks of the longest context, C
columns of sampling parameters, D deltas, F forks, S scheduled rows, N sampling rows.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.host.host_memory import to_device
from quire.ops.rows.row_arrays import COMPUTED, NARROW, WIDE, RowArrays

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RowTensors:
    """State of all rows; all tensors are contiguous. tokens_RM: int32, valid up to a row's length.
    computed_R: int64, tokens whose keys and values are stored. tables_GRL: int32, a block table per
    cache group, valid up to a row's last block. narrow_CR, wide_CR: columns of sampling parameters,
    int32 (or the bits of float32) and int64. prompt_column: column of wide_CR with the number of
    prompt tokens."""

    tokens_RM: torch.Tensor
    computed_R: torch.Tensor
    tables_GRL: torch.Tensor
    narrow_CR: torch.Tensor
    wide_CR: torch.Tensor
    block_size: int
    prompt_column: int = 0

    def __post_init__(self) -> None:
        tensors = self.tokens_RM, self.computed_R, self.tables_GRL, self.narrow_CR, self.wide_CR
        for values in tensors:
            assert values.is_contiguous(), f"needs contiguous rows, got {values.stride()}"

    @property
    def device(self) -> torch.device:
        return self.tokens_RM.device

    @cached_property
    def arrays(self) -> RowArrays:
        """Return arrays over the same memory, which must be a CPU's."""
        return RowArrays(
            self.tokens_RM.numpy(),
            self.computed_R.numpy(),
            self.tables_GRL.numpy(),
            self.narrow_CR.numpy(),
            self.wide_CR.numpy(),
            self.block_size,
        )


def write_deltas(state: RowTensors, deltas_D4: Int32) -> None:
    """Write deltas [D, 4], each to a different entry."""
    kinds = deltas_D4[:, 0]
    for kind in np.unique(kinds).tolist():
        _, rows, indices, values = deltas_D4[kinds == kind].T.astype(np.int64)
        into, where = state.computed_R, tuple[npt.NDArray[np.int64], ...]((rows,))
        if kind == NARROW:
            into, where = state.narrow_CR, (indices, rows)
        elif kind == WIDE:
            into, where = state.wide_CR.view(torch.int32), (indices // 2, 2 * rows + indices % 2)
        elif kind != COMPUTED:
            into, where = state.tables_GRL[kind], (rows, indices)
        index = tuple(to_device(each, state.device) for each in where)
        into[index] = to_device(values, state.device).to(into.dtype)


def write_tokens(state: RowTensors, row: int, position: int, token_ids: Int32) -> None:
    """Write token ids [...] of a row, from `position` on."""
    end = position + len(token_ids)
    state.tokens_RM[row, position:end] = to_device(token_ids, state.device)


def write_single_tokens(state: RowTensors, tokens_N3: npt.NDArray[np.int64]) -> None:
    """Write tokens [N, 3] of (row, position, token). Writes to the same position must be equal."""
    rows, positions, token_ids = (to_device(each, state.device) for each in tokens_N3.T.copy())
    state.tokens_RM[rows, positions] = token_ids.int()


def copy_rows(state: RowTensors, pairs_F2: Int32) -> None:
    """Copy tokens, counters, block tables and columns from parents to children. pairs [F, 2]:
    (parent, child); no child may be another fork's parent or child."""
    parents_F, children_F = (to_device(each, state.device) for each in pairs_F2.T.astype(np.int64))
    for values in (state.tokens_RM, state.computed_R):
        values[children_F] = values[parents_F]
    for columns in (state.narrow_CR, state.wide_CR, *state.tables_GRL.unsqueeze(0)):
        columns[:, children_F] = columns[:, parents_F]


def advance(
    state: RowTensors,
    rows_S: torch.Tensor,
    contexts_S: torch.Tensor,
    sampling_N: torch.Tensor,
    lengths_N: torch.Tensor,
    token_ids_N: torch.Tensor,
) -> None:
    """Append the sampled tokens [N] to their rows, then set the counters, all at once or none.
    Repeating it changes nothing.

    rows, sampling: int64. contexts: tokens of the scheduled rows after this step. lengths: tokens
    of the sampling rows. A row that was forked in this step has computed as many as its source.
    """
    state.tokens_RM[sampling_N, lengths_N] = token_ids_N.to(torch.int32)
    rows = torch.cat((rows_S, sampling_N))
    state.computed_R[rows] = torch.cat((contexts_S.to(torch.int64), lengths_N))
