"""Propose and verify draft tokens on the device without waiting for the host, by torch's operations
on any device. `kernels/sampling/draft_runs.py` proposes the same draft tokens in one launch.

Shape legend: R rows, M tokens a row can hold, G rows that get draft tokens, L maximum tokens of
such a row, T draft tokens of all rows, S scheduled rows, N sampling rows, K maximum draft tokens of
a row, P positions with a sampled token: the sampling rows' own, then one for each draft token.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.ops import gpu
from quire.ops.host.host_memory import to_device
from quire.ops.rows.row_state import RowTensors

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
NO_TOKEN = -1
NO_DRAFT = -2


class Runs(NamedTuple):
    """Bounds of the search for runs of a row's last tokens. Runs have `max_run` tokens down to
    `min_run`, and end up to `searched` tokens before the row's end."""

    min_run: int
    max_run: int
    searched: int


class DraftPositions(NamedTuple):
    """Positions at which draft tokens are verified, on the host, [P] each. sampling: index of the
    sampling row. depths: 0 for the row's own position, else which of its draft tokens, from 1."""

    sampling: Int64
    depths: Int64

    @property
    def num_samples(self) -> int:
        return int(np.count_nonzero(self.depths == 0))


def draft_runs(state: RowTensors, rows: Int32, nums: Int32, longest: int, runs: Runs) -> None:
    """Write draft tokens, as `draft_runs_reference` does; on a GPU in one launch."""
    kernels = gpu.kernels_for(state.tokens_RM, "sampling.draft_runs", any_dtype=True)
    if kernels is None:
        draft_runs_reference(state, rows, nums, longest, runs)
        return
    on_device = to_device(rows, state.device), to_device(nums, state.device)
    kernels.draft_runs(state, *on_device, int(nums.max()), runs)


def draft_runs_reference(
    state: RowTensors, rows: Int32, nums: Int32, longest: int, runs: Runs
) -> None:
    """Write draft tokens after each row's last token, which is the one after its computed tokens.

    They follow the newest of the longest earlier runs that equal the row's last tokens
    (`find_runs.py`). If they reach the row's end, they repeat from the run's end on. Rows without
    such a run get zeros.

    nums: number of draft tokens of each row, from 1. longest: maximum tokens of these rows, without
    draft tokens.
    """
    device = state.device
    rows_G = to_device(rows.astype(np.int64), device)
    lengths_G = state.computed_R[rows_G] + 1
    tokens_GL = state.tokens_RM[rows_G, :longest]
    ends_L, lengths_G1 = torch.arange(longest, device=device), lengths_G[:, None]
    first_G1 = (lengths_G1 - runs.searched).clamp(min=runs.min_run)
    is_equal_GL = (ends_L >= first_G1) & (ends_L < lengths_G1)
    run_GL = torch.zeros_like(is_equal_GL, dtype=torch.int64)
    for n in range(runs.max_run):
        own_G1 = tokens_GL.gather(1, (lengths_G1 - 1 - n).clamp(min=0))
        is_equal_GL = is_equal_GL & (tokens_GL.roll(n + 1, 1) == own_G1) & (ends_L > n)
        run_GL += is_equal_GL
    best_G = torch.where(run_GL >= runs.min_run, run_GL * longest + ends_L, -1).amax(1)
    source_G = best_G.clamp(min=0) % longest
    steps = np.concatenate([np.arange(num, dtype=np.int64) for num in nums.tolist()])
    steps_T, which_T = (to_device(a, device) for a in (steps, np.arange(len(rows)).repeat(nums)))
    offset_T, rows_T = (lengths_G - source_G)[which_T], rows_G[which_T]
    drafts_T = state.tokens_RM[rows_T, source_G[which_T] + steps_T % offset_T]
    drafts_T = torch.where(best_G[which_T] >= 0, drafts_T, 0)
    state.tokens_RM[rows_T, lengths_G[which_T] + steps_T] = drafts_T


def accept_drafts(
    state: RowTensors,
    rows_N: torch.Tensor,
    lengths_N: torch.Tensor,
    chosen_P: torch.Tensor,
    draft_positions: DraftPositions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sampled tokens, int32 [N, 1 + K], and how many of them count from the left, int32 [N].

    One counts, and one more for each accepted draft token (`runner/drafting/draft_steps.py`).
    lengths_N: tokens of the sampling rows without draft tokens, which follow them. chosen_P: the
    sampled tokens, NO_TOKEN where there was none to choose.
    """
    device, max_drafts = state.device, int(draft_positions.depths.max())
    if not gpu.is_on_gpu(state.tokens_RM):
        rows, lengths, chosen = rows_N.numpy(), lengths_N.numpy(), chosen_P.numpy()
        tokens, counts = _accept_here(
            state.arrays.tokens_RM, rows, lengths, chosen, draft_positions
        )
        return torch.from_numpy(tokens), torch.from_numpy(counts)
    index_P, depths_P = (to_device(each, device) for each in draft_positions)
    num_samples = draft_positions.num_samples
    tokens_NK1 = torch.full(
        (num_samples, 1 + max_drafts), NO_TOKEN, dtype=torch.int32, device=device
    )
    tokens_NK1[index_P, depths_P] = chosen_P.to(torch.int32)
    drafts_NK = torch.full((num_samples, max_drafts), NO_DRAFT, dtype=torch.int32, device=device)
    which_T, offset_T = index_P[num_samples:], depths_P[num_samples:] - 1
    drafts_NK[which_T, offset_T] = state.tokens_RM[rows_N[which_T], lengths_N[which_T] + offset_T]
    is_right_NK = (tokens_NK1[:, :-1] == drafts_NK) & (tokens_NK1[:, 1:] != NO_TOKEN)
    counts_N = 1 + is_right_NK.int().cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
    return tokens_NK1, counts_N


def _accept_here(
    tokens_RM: Int32,
    rows_N: Int64,
    lengths_N: Int64,
    chosen_P: Int64,
    draft_positions: DraftPositions,
) -> tuple[Int32, Int32]:
    """Compute `accept_drafts` with numpy, whose operations on few numbers take less time than
    torch's."""
    num_samples, max_drafts = draft_positions.num_samples, int(draft_positions.depths.max())
    tokens_NK1 = np.full((num_samples, 1 + max_drafts), NO_TOKEN, np.int32)
    tokens_NK1[draft_positions.sampling, draft_positions.depths] = chosen_P
    drafts_NK = np.full((num_samples, max_drafts), NO_DRAFT, np.int32)
    which_T, offset_T = (
        draft_positions.sampling[num_samples:],
        draft_positions.depths[num_samples:] - 1,
    )
    drafts_NK[which_T, offset_T] = tokens_RM[rows_N[which_T], lengths_N[which_T] + offset_T]
    is_right_NK = (tokens_NK1[:, :-1] == drafts_NK) & (tokens_NK1[:, 1:] != NO_TOKEN)
    counts_N = 1 + np.logical_and.accumulate(is_right_NK, axis=1).sum(axis=1, dtype=np.int32)
    return tokens_NK1, counts_N
