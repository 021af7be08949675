"""Compare the gathered inputs of a step, by the core and by torch, with a plain loop."""

import numpy as np
import pytest
import torch

from quire.ops.host.native import core
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import StepInputs, gather_step, gather_step_reference

ROWS, TOKENS = 7, 60


def random_state(block_size: int, num_groups: int, seed: int = 0) -> RowTensors:
    generator = np.random.default_rng(seed)
    num_blocks = -(-TOKENS // block_size)

    def random(most: int, *shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.integers(0, most, shape))

    return RowTensors(
        tokens_RM=random(1000, ROWS, TOKENS).int(),
        computed_R=random(TOKENS - 30, ROWS),
        tables_GRL=random(99, num_groups, ROWS, num_blocks).int(),
        narrow_CR=torch.zeros(0, ROWS, dtype=torch.int32),
        wide_CR=torch.zeros(0, ROWS, dtype=torch.int64),
        block_size=block_size,
    )


def plainly(state: RowTensors, rows: list[int], num_tokens: list[int], longest: int) -> StepInputs:
    at = [
        (row, int(state.computed_R[row]) + i)
        for row, count in zip(rows, num_tokens, strict=True)
        for i in range(count)
    ]
    size = state.block_size
    slots = tuple(
        torch.tensor([int(table[row, p // size]) * size + p % size for row, p in at])
        for table in state.tables_GRL
    )
    lengths = [int(state.computed_R[r]) + n for r, n in zip(rows, num_tokens, strict=True)]
    return StepInputs(
        torch.tensor([int(state.tokens_RM[row, p]) for row, p in at]),
        torch.tensor([p for _, p in at]),
        torch.tensor([0, *np.cumsum(num_tokens)], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        slots,
        tuple(torch.stack([table[row, :longest] for row in rows]) for table in state.tables_GRL),
    )


@pytest.mark.parametrize("gather", [gather_step, gather_step_reference])
@pytest.mark.parametrize(("block_size", "num_groups"), [(1, 1), (16, 2), (5, 3)])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [4, 1, 30], [17, 1, 2, 1, 9, 1, 1]])
def test_gathered_inputs_equal_a_plain_loop(
    gather: object, block_size: int, num_groups: int, counts: list[int]
) -> None:
    if gather is gather_step and core() is None:
        pytest.skip("the C++ core was not built")
    state = random_state(block_size, num_groups)
    rows = [5, 0, 3, 6, 1, 2, 4][: len(counts)]
    wanted = plainly(state, rows, counts, longest=-(-TOKENS // block_size))
    got = gather(  # type: ignore[operator]
        state,
        np.array(rows, np.int32),
        np.array(counts, np.int32),
        -(-TOKENS // block_size),
    )
    for name in StepInputs.__dataclass_fields__:
        found, expected = getattr(got, name), getattr(wanted, name)
        if not isinstance(found, tuple):
            found, expected = (found,), (expected,)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), name
