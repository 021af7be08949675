"""The row state in arrays and in tensors: the same changes give the same state."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire.ops.host.native import core
from quire.ops.rows import row_state
from quire.ops.rows.row_arrays import COMPUTED, NARROW, WIDE, RowArrays, gather_arrays
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import gather_step_reference

ROWS, LENGTH, GROUPS, BLOCKS, SIZE = 5, 23, 2, 7, 4
NAMES = ("tokens_RM", "computed_R", "tables_GRL", "narrow_CR", "wide_CR")


@pytest.fixture
def numbers() -> np.random.Generator:
    return np.random.default_rng(3)


def both(numbers: np.random.Generator) -> tuple[RowArrays, RowTensors]:
    """Return arrays, and tensors that are copies of them."""

    def ints(*shape: int, below: int = 50, dtype: type = np.int32) -> npt.NDArray[np.generic]:
        return numbers.integers(0, below, shape).astype(dtype)

    arrays = RowArrays(
        ints(ROWS, LENGTH),
        ints(ROWS, below=12, dtype=np.int64),
        ints(GROUPS, ROWS, BLOCKS),
        ints(3, ROWS),
        ints(2, ROWS, dtype=np.int64),
        SIZE,
    )
    tensors = [torch.from_numpy(getattr(arrays, name).copy()) for name in NAMES]
    return arrays, RowTensors(*tensors, block_size=SIZE)


def assert_alike(arrays: RowArrays, tensors: RowTensors) -> None:
    for name in NAMES:
        assert (getattr(arrays, name) == getattr(tensors, name).numpy()).all(), name


def test_deltas_tokens_and_copies_give_the_same_state(numbers: np.random.Generator) -> None:
    arrays, tensors = both(numbers)
    deltas = np.array(
        [
            (0, 1, 2, 9),
            (1, 4, 6, 8),
            (1, 0, 0, 7),
            (COMPUTED, 3, 0, 11),
            (NARROW, 2, 1, -5),
            (WIDE, 4, 2, -1),
            (WIDE, 4, 3, 6),
            (WIDE, 0, 1, 3),
        ],
        np.int32,
    )
    arrays.write_deltas(deltas)
    row_state.write_deltas(tensors, deltas)
    assert_alike(arrays, tensors)
    assert arrays.wide_CR[1, 4] == (6 << 32) + 0xFFFFFFFF
    arrays.write_tokens(2, 20, np.array([1, 2, 3], np.int32))
    row_state.write_tokens(tensors, 2, 20, np.array([1, 2, 3], np.int32))
    arrays.copy_row(4, 1)
    row_state.copy_rows(tensors, np.array([(4, 1)], np.int32))
    assert_alike(arrays, tensors)


def test_advance_gives_the_same_state(numbers: np.random.Generator) -> None:
    arrays, tensors = both(numbers)
    rows, contexts = np.array([3, 0], np.int32), np.array([9, 5], np.int32)
    sampling, lengths = np.array([0, 2], np.int32), np.array([5, 8], np.int64)
    ids = np.array([44, 45], np.int64)
    for _ in range(2):  # the second time changes nothing
        arrays.advance(rows, contexts, sampling, lengths, ids)
    wide = [torch.from_numpy(each.astype(np.int64)) for each in (rows, contexts, sampling)]
    row_state.advance(tensors, *wide, torch.from_numpy(lengths), torch.from_numpy(ids))
    assert_alike(arrays, tensors)
    assert arrays.tokens_RM[2, 8] == 45 and arrays.computed_R[2] == 8


@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_gathered_arrays_equal_the_reference(numbers: np.random.Generator) -> None:
    arrays, tensors = both(numbers)
    rows, counts = np.array([4, 1, 2], np.int32), np.array([3, 1, 6], np.int32)
    found = gather_arrays(arrays, rows, counts, 6)
    wanted = gather_step_reference(tensors, rows, counts, 6)
    for name in ("ids_T", "positions_T", "query_starts_S1", "context_lens_S"):
        assert (getattr(found, name) == getattr(wanted, name).numpy()).all(), name
    for group in range(GROUPS):
        assert (found.slots_GT[group] == wanted.slots_T[group].numpy()).all()
        assert (found.tables_GSL[group] == wanted.block_tables_SL[group].numpy()).all()
