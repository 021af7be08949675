"""Compare a slot's changes to the row state with plain loops."""

import random

import numpy as np
import pytest
import torch

from quire.ops.kernels import row_deltas as kernels
from quire.ops.kernels.step_inputs import Inbox, inbox_words
from quire.ops.rows.row_state import RowTensors

ROWS, TOKENS, GROUPS, BLOCKS = 7, 3000, 2, 9
NARROW, WIDE = 5, 3  # columns
POISON = 12345
LAYOUT = kernels.SlotLayout(max_rows=5, max_deltas=700, max_runs=40, max_tokens=9000)


def make_state(device: torch.device) -> RowTensors:
    generator = torch.Generator().manual_seed(0)

    def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        most = 2**31 - 1 if dtype == torch.int32 else 2**62
        return torch.randint(-most, most, shape, generator=generator).to(dtype).to(device)

    return RowTensors(
        numbers(torch.int32, ROWS, TOKENS),
        numbers(torch.int64, ROWS),
        numbers(torch.int32, GROUPS, ROWS, BLOCKS),
        numbers(torch.int32, NARROW, ROWS),
        numbers(torch.int64, WIDE, ROWS),
        block_size=16,
    )


def tensors(state: RowTensors) -> tuple[torch.Tensor, ...]:
    columns = state.narrow_CR, state.wide_CR
    return (state.tokens_RM, state.computed_R, state.tables_GRL, *columns)


def same(one: RowTensors, other: RowTensors) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def apply_plainly(state: RowTensors, deltas: list[tuple[int, int, int, int]]) -> None:
    halves = state.wide_CR.view(torch.int32).view(WIDE, ROWS, 2)
    for kind, row, index, value in deltas:
        if kind == kernels.COMPUTED:
            state.computed_R[row] = value
        elif kind == kernels.NARROW:
            state.narrow_CR[index, row] = value
        elif kind == kernels.WIDE:
            halves[index // 2, row, index % 2] = value
        else:
            state.tables_GRL[kind, row, index] = value


def all_deltas() -> list[tuple[int, int, int, int]]:
    """Return one delta for each element of the state, with values of all sizes."""
    places = [(kernels.COMPUTED, 1), (kernels.NARROW, NARROW), (kernels.WIDE, 2 * WIDE)]
    places += [(group, BLOCKS) for group in range(GROUPS)]
    return [
        (kind, row, index, random.randrange(0 if kind == kernels.COMPUTED else -(2**31), 2**31))
        for kind, num in places
        for row in range(ROWS)
        for index in range(num)
    ]


@pytest.mark.parametrize("count", [0, 1, 5, 150])
@pytest.mark.parametrize("has_lists", [False, True])
def test_receive_applies_deltas_runs_and_lists_of_a_slot(
    count: int, has_lists: bool, device: torch.device
) -> None:
    """It reads nothing after the given numbers of deltas and runs."""
    random.seed(count)
    state, wanted = make_state(device), make_state(device)
    deltas = random.sample(all_deltas(), count)
    lengths = [random.choice([1, 3, 255, 256, 257, 700]) for _ in range(min(count, ROWS))]
    starts = [random.randrange(TOKENS - length) for length in lengths]
    texts = [np.random.default_rng(i).integers(0, 2**31, n) for i, n in enumerate(lengths)]

    slot = torch.full((LAYOUT.num_words,), POISON, dtype=torch.int32)
    array = slot.numpy()
    array[LAYOUT.deltas_at : LAYOUT.deltas_at + 4 * count] = np.ravel(deltas)
    used = 0
    for row, (start, text) in enumerate(zip(starts, texts, strict=True)):
        at = LAYOUT.runs_at + 4 * row
        array[at : at + 4] = row, start, used, len(text)
        array[LAYOUT.tokens_at + used : LAYOUT.tokens_at + used + len(text)] = text
        used += len(text)
        wanted.tokens_RM[row, start : start + len(text)] = torch.from_numpy(text).int().to(device)
    apply_plainly(wanted, deltas)

    inbox = Inbox.empty(LAYOUT.max_rows, device)
    kernels.receive(state, inbox, slot.to(device), LAYOUT, count, len(texts), has_lists)
    assert same(state, wanted)
    lists = slot[: inbox_words(LAYOUT.max_rows)].to(device)
    assert torch.equal(inbox.words, lists) if has_lists else not inbox.words.any()


def test_few_programs_apply_many_deltas(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 2)
    test_receive_applies_deltas_runs_and_lists_of_a_slot(150, True, device)


def test_copy_rows_copies_each_parent_to_its_forks(device: torch.device) -> None:
    state, wanted = make_state(device), make_state(device)
    slot = torch.full((LAYOUT.num_words,), POISON, dtype=torch.int32)
    forks = [(2, 0), (2, 6), (4, 1)]
    slot[LAYOUT.forks_at : LAYOUT.forks_at + 6] = torch.tensor(forks).flatten().int()
    for parent, child in forks:
        for values in tensors(wanted)[:2]:
            values[child] = values[parent]
        for values in tensors(wanted)[2:]:
            values[:, child] = values[:, parent]
    kernels.copy_rows(state, slot.to(device), LAYOUT, len(forks))
    assert same(state, wanted)
    kernels.copy_rows(state, slot.to(device), LAYOUT, 0)
    assert same(state, wanted)
