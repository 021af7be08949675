"""Inputs of a forward pass, gathered from the state of its scheduled rows.

Shape legend: R rows, M tokens a row can hold, S scheduled rows, T tokens of the step, L blocks, N
sampling rows.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.host.host_memory import to_device
from quire.ops.host.native import core_for
from quire.ops.rows.row_arrays import gather_arrays
from quire.ops.rows.row_state import RowTensors

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepInputs:
    """Inputs of a forward pass. ids_T, positions_T: int64. query_starts_S1, context_lens_S: int32.
    Per cache group slots_T (block * size + offset, int64) and block_tables_SL (int32)."""

    ids_T: torch.Tensor
    positions_T: torch.Tensor
    query_starts_S1: torch.Tensor
    context_lens_S: torch.Tensor
    slots_T: tuple[torch.Tensor, ...]
    block_tables_SL: tuple[torch.Tensor, ...]

    def row_slots(self) -> torch.Tensor:
        """Return the row slot of each token, int64 [T]; S for padding."""
        ends_S = self.query_starts_S1[1:]
        at_T = torch.arange(len(self.ids_T), device=ends_S.device, dtype=ends_S.dtype)
        return torch.searchsorted(ends_S, at_T, right=True)


@dataclass(frozen=True)
class SampleInputs:
    """Inputs of sampling, int64 [N] each. rows: sampling rows. last: index in the step of the token
    that gives the logits. lengths: known tokens of each row. prompt_lens: prompt tokens of each
    row."""

    rows: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor
    prompt_lens: torch.Tensor


def gather_step(state: RowTensors, rows: Int32, num_tokens: Int32, longest: int) -> StepInputs:
    """Gather each row's next `num_tokens` [S] tokens after its computed ones, one row after the
    other.

    longest: blocks of the longest context, the width of the step's tables.
    """
    if core_for(state.tokens_RM) is None:
        return gather_step_reference(state, rows, num_tokens, longest)
    return _gather_natively(state, rows, num_tokens, longest)


def gather_step_reference(
    state: RowTensors, rows: Int32, num_tokens: Int32, longest: int
) -> StepInputs:
    """Compute `gather_step` with torch operations, on any device."""
    device, size = state.tokens_RM.device, state.block_size
    rows_S, query_lens_S = (to_device(a.astype(np.int64), device) for a in (rows, num_tokens))
    total = int(num_tokens.sum())
    starts_S = state.computed_R[rows_S]
    query_starts_S1 = torch.zeros(len(rows_S) + 1, dtype=torch.int64, device=device)
    torch.cumsum(query_lens_S, 0, out=query_starts_S1[1:])
    rows_T = rows_S.repeat_interleave(query_lens_S, output_size=total)
    shift_S = starts_S - query_starts_S1[:-1]
    shift_T = shift_S.repeat_interleave(query_lens_S, output_size=total)
    positions_T = torch.arange(total, device=device) + shift_T
    blocks_T, offsets_T = positions_T // size, positions_T % size
    tables = state.tables_GRL.unbind()
    return StepInputs(
        ids_T=state.tokens_RM[rows_T, positions_T].long(),
        positions_T=positions_T,
        query_starts_S1=query_starts_S1.int(),
        context_lens_S=(starts_S + query_lens_S).int(),
        slots_T=tuple(t[rows_T, blocks_T].long() * size + offsets_T for t in tables),
        block_tables_SL=tuple(t[rows_S, :longest] for t in tables),
    )


def _gather_natively(state: RowTensors, rows: Int32, num_tokens: Int32, longest: int) -> StepInputs:
    found = gather_arrays(state.arrays, rows, num_tokens, longest)
    return StepInputs(
        torch.from_numpy(found.ids_T),
        torch.from_numpy(found.positions_T),
        torch.from_numpy(found.query_starts_S1),
        torch.from_numpy(found.context_lens_S),
        torch.from_numpy(found.slots_GT).unbind(),
        torch.from_numpy(found.tables_GSL).unbind(),
    )
