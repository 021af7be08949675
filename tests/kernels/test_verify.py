"""Compare positions and acceptance of draft tokens by kernels with torch's operations."""

import numpy as np
import pytest
import torch

from quire.ops.kernels.sampling import draft_runs, verify
from quire.ops.kernels.step_inputs import HEADER, Inbox
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import SampleInputs
from quire.ops.sampling.device_drafts import (
    NO_TOKEN,
    DraftPositions,
    Runs,
    accept_drafts,
    draft_runs_reference,
)

ROWS, LENGTH, SLOTS = 9, 40, 7  # rows of the engine, row slots of the size
MAX_DRAFTS = 5


class Step:
    """A step of rows with drafts, plain rows, one that computes a part of its prompt, and a fork
    of a plain row. counts: draft tokens of each row of the engine; rows outside of the step have a
    stale number."""

    def __init__(self, seed: int, device: torch.device) -> None:
        random = np.random.default_rng(seed)
        self.counts = np.full(ROWS, 3, np.int32)
        self.rows = random.permutation(ROWS)[:5].astype(np.int32)
        fork = next(row for row in range(ROWS) if row not in self.rows)
        self.sampling = np.array([*self.rows[:4], fork], np.int32)
        self.sources = np.array([0, 1, 2, 3, 3])
        self.counts[self.rows] = [random.integers(1, MAX_DRAFTS + 1), 0, 2, 0, 0]
        self.counts[fork] = 0
        self.num_tokens = self.counts[self.rows] + 1
        self.num_tokens[4] = 6
        self.known = random.integers(6, LENGTH - MAX_DRAFTS - 2, 5)  # tokens without drafts
        tokens = random.integers(0, 3, (ROWS, LENGTH)).astype(np.int32)
        nothing = torch.zeros((1, ROWS), dtype=torch.int32, device=device)
        computed = torch.full((ROWS,), -7, dtype=torch.int64, device=device)
        self.state = RowTensors(
            torch.from_numpy(tokens).to(device), computed, nothing[None], nothing, nothing.long(),
            block_size=16,
        )  # fmt: skip
        words = np.full(HEADER + 4 * ROWS, 1, np.int32)
        words[0], words[1] = 5, 5
        words[HEADER : HEADER + 5] = self.rows
        words[HEADER + ROWS : HEADER + ROWS + 5] = self.num_tokens
        pairs = np.stack((self.sampling, self.sources), axis=1)
        words[HEADER + 2 * ROWS : HEADER + 2 * ROWS + 10] = pairs.ravel()
        self.inbox = Inbox(torch.from_numpy(words).to(device), ROWS)
        self.drafts_R = torch.from_numpy(self.counts).to(device)
        self.contexts = np.zeros(SLOTS, np.int32)
        self.contexts[:5] = self.known + self.counts[self.rows]

    @property
    def samples(self) -> SampleInputs:
        """Return the samples of the row slots, as `gather_step` writes them."""
        found = np.zeros((4, SLOTS), np.int64)
        found[0, :5] = self.sampling
        found[1, :5] = (np.cumsum(self.num_tokens) - 1)[self.sources]
        found[2, :5] = self.contexts[self.sources]
        found[3, :5] = 4
        return SampleInputs(*torch.from_numpy(found).to(self.state.device).unbind())

    @property
    def places(self) -> DraftPositions:
        """Return the sampling rows' own positions, then the positions of each row's drafts."""
        counts = self.counts[self.sampling]
        drafts = [(n, 1 + i) for n, count in enumerate(counts.tolist()) for i in range(count)]
        sampling, depths = np.array([*((n, 0) for n in range(5)), *drafts]).T
        return DraftPositions(sampling, depths)


@pytest.mark.parametrize("seed", range(4))
def test_draft_positions_have_the_expected_rows_and_lengths(
    seed: int, device: torch.device
) -> None:
    step = Step(seed, device)
    num_positions = SLOTS + 20
    found = verify.draft_positions(
        step.inbox, step.drafts_R, step.samples, num_positions, MAX_DRAFTS
    )
    places, samples = step.places, step.samples
    slots = np.where(places.depths == 0, places.sampling, SLOTS + np.arange(len(places.depths)) - 5)
    own = step.counts[step.sampling]
    for name, step_by in (("rows", 0), ("last", 1), ("lengths", 1), ("prompt_lens", 0)):
        wanted = np.zeros(num_positions, np.int64)
        values = getattr(samples, name).cpu().numpy()[places.sampling]
        wanted[slots] = values + step_by * (places.depths - own[places.sampling])
        assert getattr(found, name).tolist() == wanted.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_accepted_tokens_equal_torchs_and_are_stored(seed: int, device: torch.device) -> None:
    """Three distinct tokens make some drafts right. Some positions have no valid token."""
    step = Step(seed, device)
    places, state = step.places, step.state
    random = np.random.default_rng(seed + 50)
    chosen = random.integers(0, 3, len(places.depths))
    lengths = step.known[step.sources]
    right = state.tokens_RM.cpu().numpy()[
        step.sampling[places.sampling], np.minimum(lengths[places.sampling] + places.depths, 39)
    ]
    chosen = np.where(random.random(len(chosen)) < 0.7, right, chosen)
    chosen[random.random(len(chosen)) < 0.1] = NO_TOKEN
    rows_N, lengths_N = (
        torch.from_numpy(each.astype(np.int64)).to(device) for each in (step.sampling, lengths)
    )
    chosen_P = torch.from_numpy(chosen).to(device)
    tokens, counts = accept_drafts(state, rows_N, lengths_N, chosen_P, places)
    ids_P = torch.full((SLOTS + 20,), 77, dtype=torch.int64, device=device)
    slots = np.where(places.depths == 0, places.sampling, SLOTS + np.arange(len(chosen)) - 5)
    ids_P[torch.from_numpy(slots).to(device)] = chosen_P.clamp(min=0)
    is_valid_P = torch.ones_like(ids_P, dtype=torch.bool)
    is_valid_P[torch.from_numpy(slots[chosen == NO_TOKEN]).to(device)] = False
    before = state.tokens_RM.clone()
    contexts = torch.from_numpy(step.contexts).to(device)
    found = verify.accept_drafts(
        state, step.inbox, step.drafts_R, contexts, ids_P, is_valid_P, MAX_DRAFTS
    )
    width = tokens.shape[1]
    assert found[0][:5, :width].tolist() == tokens.tolist()
    assert found[1][:5].tolist() == counts.tolist()
    assert (found[0][:5, width:] == NO_TOKEN).all()
    ends = lengths + counts.cpu().numpy() - 1
    for n, row in enumerate(step.sampling.tolist()):
        before[row, ends[n]] = max(int(tokens[n, counts[n] - 1]), 0)
        assert state.computed_R[row] == ends[n]
    assert state.computed_R[step.rows[4]] == step.contexts[4], "a row that only computes"
    assert torch.equal(state.tokens_RM, before)
    assert (state.computed_R == -7).sum() == ROWS - 6


def test_drafts_for_a_step_equal_the_reference(device: torch.device) -> None:
    """Rows without drafts and rows outside of the step stay unchanged."""
    step, runs = Step(3, device), Runs(1, 3, 100)
    step.state.computed_R[torch.from_numpy(step.rows.astype(np.int64)).to(device)] = (
        torch.from_numpy(step.known - 1).to(device)
    )
    wanted = RowTensors(**vars(step.state) | {"tokens_RM": step.state.tokens_RM.clone()})
    drafting = step.rows[step.counts[step.rows] > 0]
    longest = int(step.known.max())
    draft_runs_reference(wanted, drafting, step.counts[drafting], longest, runs)
    draft_runs.draft_runs_of_step(step.state, step.inbox, step.drafts_R, SLOTS, MAX_DRAFTS, runs)
    assert torch.equal(step.state.tokens_RM, wanted.tokens_RM)
