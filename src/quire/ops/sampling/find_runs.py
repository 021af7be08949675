"""Find where the last tokens of rows occurred before, to propose draft tokens ("prompt lookup")."""

import numpy as np
import numpy.typing as npt

from quire.ops.host.native import core

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

SEARCHED = 32_768  # tokens before a sequence's end; takes some 20 us


def find_runs(
    tokens_RM: Int32, rows: Int64, lengths: Int64, min_run: int, max_run: int, searched: int
) -> Int64:
    """Return the end of the newest of the longest runs that equal each row's last tokens, int64
    [N]; -1 if there is none. A run has at least `min_run` tokens, and at most `max_run` are
    compared.

    tokens_RM: int32. rows, lengths: [N], the rows and their numbers of tokens. searched: how far
    before a row's end a run may end.
    """
    native = core()
    if native is None:
        return find_runs_reference(tokens_RM, rows, lengths, min_run, max_run, searched)
    assert tokens_RM.dtype == np.int32 and tokens_RM.strides[1] == 4
    assert rows.dtype == lengths.dtype == np.int64
    rows, lengths = np.ascontiguousarray(rows), np.ascontiguousarray(lengths)
    ends_N = np.empty(len(rows), np.int64)
    native.find_runs(
        tokens_RM.ctypes.data, tokens_RM.strides[0] // 4, rows.ctypes.data, lengths.ctypes.data,
        len(rows), min_run, max_run, searched, ends_N.ctypes.data,
    )  # fmt: skip
    return ends_N


def find_runs_reference(
    tokens_RM: Int32, rows: Int64, lengths: Int64, min_run: int, max_run: int, searched: int
) -> Int64:
    """Compute `find_runs` with numpy, [N]."""
    found = np.full(len(rows), -1, np.int64)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        if length <= min_run:
            continue
        tokens = tokens_RM[row, :length]
        first = max(length - searched, min_run)
        ends = first + np.flatnonzero(tokens[first - 1 : length - 1] == tokens[-1])
        runs = np.ones(len(ends), np.int64)
        for n in range(1, max_run):
            is_equal = (ends > n) & (runs == n)
            is_equal[is_equal] = tokens[ends[is_equal] - 1 - n] == tokens[length - 1 - n]
            runs[is_equal] += 1
        if len(runs) and runs.max() >= min_run:
            found[i] = ends[np.flatnonzero(runs == runs.max())[-1]]
    return found
