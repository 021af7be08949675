"""State of the rows in host arrays, and its updates. This module does not import torch.

A delta is four words (int32): (kind, row, index, value). By kind:

    a cache group     the table's entry `index` becomes block `value`
    COMPUTED          the row has computed `value` tokens
    NARROW            column `index` of 32 bits
    WIDE              half `index % 2` (the lower one first) of column `index // 2` of 64

Of several writes to one entry only the last counts (`last_writes`). `row_state.py` does the same
with tensors, on any device.

Shape legend: R rows, M tokens a row can hold, G cache groups, L blocks of the longest context, C
columns of sampling parameters, D deltas, F forks, S scheduled rows, N sampling rows, T tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.ops.host.native import needed_core

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

COMPUTED, NARROW, WIDE = -1, -2, -3  # kinds of deltas, other than cache groups


@dataclass(frozen=True)
class RowArrays:
    """Arrays with the names and contents of `RowTensors`. New arrays are zeros that occupy no
    memory before they are written."""

    tokens_RM: Int32
    computed_R: Int64
    tables_GRL: Int32
    narrow_CR: Int32
    wide_CR: Int64
    block_size: int

    def write_deltas(self, deltas_D4: Int32) -> None:
        """Write deltas [D, 4], each to a different entry."""
        kinds = deltas_D4[:, 0]
        for kind in set(kinds.tolist()):
            _, rows, indices, values = deltas_D4[kinds == kind].T
            if kind == COMPUTED:
                self.computed_R[rows] = values
            elif kind == NARROW:
                self.narrow_CR[indices, rows] = values
            elif kind == WIDE:
                self.wide_CR.view(np.int32)[indices // 2, 2 * rows + indices % 2] = values
            else:
                self.tables_GRL[kind, rows, indices] = values

    def write_tokens(self, row: int, position: int, token_ids: Int32) -> None:
        """Write token ids [...] of a row, from `position` on."""
        self.tokens_RM[row, position : position + len(token_ids)] = token_ids

    def copy_row(self, parent: int, child: int) -> None:
        """Copy a row's tokens, counters, block tables and columns from parent to child."""
        for values in (self.tokens_RM, self.computed_R):
            values[child] = values[parent]
        for columns in (self.narrow_CR, self.wide_CR, *self.tables_GRL[None]):
            columns[:, child] = columns[:, parent]

    def advance(
        self, rows_S: Int32, contexts_S: Int32, sampling_N: Int32, lengths_N: Int64, ids_N: Int64
    ) -> None:
        """Append the sampled tokens [N] to their rows, then set the counters, all at once or none.
        Repeating it changes nothing. See `row_state.advance`."""
        self.tokens_RM[sampling_N, lengths_N] = ids_N
        rows = np.concatenate((rows_S, sampling_N))
        self.computed_R[rows] = np.concatenate((contexts_S, lengths_N))


@dataclass(frozen=True)
class StepArrays:
    """Inputs of a forward pass for scheduled rows, as in `StepInputs`. tables_GSL: contiguous."""

    ids_T: Int64
    positions_T: Int64
    query_starts_S1: Int32
    context_lens_S: Int32
    slots_GT: Int64
    tables_GSL: Int32


def gather_arrays(state: RowArrays, rows: Int32, num_tokens: Int32, longest: int) -> StepArrays:
    """Gather each row's next `num_tokens` [S] tokens after its computed ones, one row after the
    other.

    longest: blocks of the longest context, the width of the step's tables.
    """
    rows, num_tokens = np.ascontiguousarray(rows), np.ascontiguousarray(num_tokens)
    num_rows, total, groups = len(rows), int(num_tokens.sum()), len(state.tables_GRL)
    long = np.empty((2 + groups, total), np.int64)
    short = np.empty(2 * num_rows + 1 + groups * num_rows * longest, np.int32)
    needed_core().gather_step(
        wide=long.ctypes.data,
        narrow=short.ctypes.data,
        tokens=state.tokens_RM.ctypes.data,
        token_stride=state.tokens_RM.shape[1],
        computed=state.computed_R.ctypes.data,
        rows=rows.ctypes.data,
        num_tokens=num_tokens.ctypes.data,
        num_rows=num_rows,
        tables=[(each.ctypes.data, each.shape[1]) for each in state.tables_GRL],
        block_size=state.block_size,
        total=total,
        longest=longest,
    )
    ends = num_rows + 1, 2 * num_rows + 1
    return StepArrays(
        long[0],
        long[1],
        short[: ends[0]],
        short[ends[0] : ends[1]],
        long[2:],
        short[ends[1] :].reshape(groups, num_rows, longest),
    )


def last_writes(destination: npt.NDArray[np.signedinteger]) -> npt.NDArray[np.int32]:
    """Return the indices [...] of the last write to each destination, ascending."""
    order = np.argsort(destination, kind="stable")  # np.unique would import masked arrays, 15 ms
    destinations = destination[order]
    is_last = np.ones(len(destinations), bool)
    is_last[:-1] = destinations[1:] != destinations[:-1]
    return np.sort(order[is_last]).astype(np.int32)
