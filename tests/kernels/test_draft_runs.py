"""Draft tokens that a device proposes, by the kernel or by torch, equal the host's."""

import numpy as np
import pytest
import torch

from quire.engine.drafting.drafting import repeated
from quire.ops.kernels.sampling import draft_runs as kernels
from quire.ops.rows.row_state import RowTensors
from quire.ops.sampling import device_drafts
from quire.ops.sampling.device_drafts import NO_TOKEN, DraftPositions, Runs, accept_drafts
from quire.ops.sampling.find_runs import find_runs_reference

ROWS, LENGTH = 6, 2600


def state_of(tokens_RM: np.ndarray, lengths: np.ndarray, device: torch.device) -> RowTensors:
    """Return rows whose lengths the host does not know; each computed all but its last token."""
    nothing = torch.zeros((1, len(lengths)), dtype=torch.int32, device=device)
    computed = torch.from_numpy(lengths - 1).to(device)
    return RowTensors(
        torch.from_numpy(tokens_RM.copy()).to(device), computed, nothing[None], nothing,
        nothing.long(), block_size=16,
    )  # fmt: skip


def expected(tokens_RM: np.ndarray, lengths: np.ndarray, rows, nums, runs: Runs) -> np.ndarray:
    found = tokens_RM.copy()
    places = find_runs_reference(tokens_RM, rows.astype(np.int64), lengths[rows], *runs)
    for row, num, place in zip(rows.tolist(), nums.tolist(), places.tolist(), strict=True):
        length = int(lengths[row])
        drafts = repeated(tokens_RM[row, :length], place, num) if place >= 0 else [0] * num
        found[row, length : length + num] = drafts
    return found


def draft(state: RowTensors, rows, nums, longest: int, runs: Runs, by_kernel: bool) -> None:
    if by_kernel:
        on_device = (torch.from_numpy(each).to(state.device) for each in (rows, nums))
        kernels.draft_runs(state, *on_device, int(nums.max()), runs)
    else:
        device_drafts.draft_runs_reference(state, rows, nums, longest, runs)


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_device_drafts_equal_the_hosts(seed: int, by_kernel: bool, device: torch.device) -> None:
    """Most texts have few distinct tokens, so that runs of all lengths occur."""
    random = np.random.default_rng(seed)
    words = int(random.choice([2, 3, 9, 5000]))
    tokens_RM = random.integers(0, words, (ROWS, LENGTH)).astype(np.int32)
    tokens_RM[1] = np.tile(tokens_RM[1, :7], LENGTH)[:LENGTH]  # repeats itself
    tokens_RM[2, 2000:2300] = tokens_RM[2, 100:400]  # far back, in another block of the search
    lengths = random.integers(1, LENGTH - 9, ROWS)
    lengths[2], lengths[3] = 2250, random.integers(1, 5)
    shortest = int(random.integers(1, 4))
    searched = int(random.choice([3, 700, 5000]))
    runs = Runs(shortest, shortest + int(random.integers(0, 4)), searched)
    rows = random.permutation(ROWS)[:4].astype(np.int32)
    nums = random.integers(1, 9, 4).astype(np.int32)
    state = state_of(tokens_RM, lengths, device)
    longest = int(lengths[rows].max()) + int(random.integers(0, 9))
    draft(state, rows, nums, longest, runs, by_kernel)
    found = state.tokens_RM.cpu().numpy()
    assert (found == expected(tokens_RM, lengths, rows, nums, runs)).all()


def test_drafts_fill_a_row_up_to_its_last_slot(device: torch.device) -> None:
    tokens_RM = np.tile(np.array([5, 6], np.int32), (2, 4))
    tokens_RM[:, 6:] = 9
    state = state_of(tokens_RM, np.array([6, 6]), device)
    nums, rows = np.array([2, 1], np.int32), np.arange(2, dtype=np.int32)
    device_drafts.draft_runs_reference(state, rows, nums, 6, Runs(2, 2, 100))
    assert state.tokens_RM[:, 6:].tolist() == [[5, 6], [5, 9]]


def test_acceptance_ends_at_the_first_wrong_draft(device: torch.device) -> None:
    """Rows have three, no and two drafts; two positions have nothing to sample."""
    tokens_RM = np.zeros((4, 9), np.int32)
    tokens_RM[3, 4:7], tokens_RM[0, 2:4] = [11, 12, 13], [21, 22]
    state = state_of(tokens_RM, np.array([2, 1, 1, 4]), device)
    positions = DraftPositions(
        np.array([0, 1, 2, 0, 0, 0, 2, 2]), np.array([0, 0, 0, 1, 2, 3, 1, 2])
    )
    chosen = torch.tensor([11, NO_TOKEN, 21, 12, 7, 8, 22, NO_TOKEN], device=device)
    rows, lengths = torch.tensor([3, 1, 0], device=device), torch.tensor([4, 1, 2], device=device)
    tokens, counts = accept_drafts(state, rows, lengths, chosen, positions)
    assert counts.tolist() == [3, 1, 2]
    assert tokens.tolist() == [[11, 12, 7, 8], [-1, -1, -1, -1], [21, 22, -1, -1]]
