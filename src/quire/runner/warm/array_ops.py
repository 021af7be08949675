"""Step operations on rows and logits without torch: numpy arrays and the C++ core.

The third kind of `StepOps`, for plain plans (`conditions.is_plain`). It writes the same bits as
`torch_ops.py`.

Shape legend: S scheduled rows, N sampling rows, P some of them, V vocabulary, F forks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.ops.host.native import needed_core
from quire.ops.host.threads import num_threads
from quire.ops.rows.row_arrays import RowArrays, gather_arrays
from quire.runner.rows import FLOATS, NARROW_COLUMNS, WIDE_COLUMNS
from quire.runner.step_ops import (
    NUM_RESULTS,
    Gathered,
    Needs,
    RowUpdates,
    StepLists,
    StepShape,
    Update,
)

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]


def empty_arrays(num_rows: int, length: int, num_groups: int, block_size: int) -> RowArrays:
    """Allocate the state of rows of up to `length` tokens, with no requests."""
    num_blocks = -(-length // block_size) + 1
    narrow_CR = np.zeros((len(NARROW_COLUMNS), num_rows), np.int32)
    narrow_CR[NARROW_COLUMNS.index("edits")] = -1
    return RowArrays(
        np.zeros((num_rows, length), np.int32),
        np.zeros(num_rows, np.int64),
        np.zeros((num_groups, num_rows, num_blocks), np.int32),
        narrow_CR,
        np.zeros((len(WIDE_COLUMNS), num_rows), np.int64),
        block_size,
    )


@dataclass(frozen=True)
class SampleArrays:
    """Numpy counterpart of `SampleInputs`, with the same field names."""

    rows: Int32
    last: Int64
    lengths: Int64
    prompt_lens: Int64


class ArrayOps:
    """Step operations without torch; see StepOps. state: of the rows."""

    can_be_recorded = False

    def __init__(self, state: RowArrays) -> None:
        self._state = state
        self.results_QR: Any = np.zeros((NUM_RESULTS, len(state.computed_R)), np.int32)
        self._lists: StepLists | None = None

    def fork(self, pairs_F2: Int32) -> None:
        """Copy rows, as pairs (parent, child)."""
        for parent, child in pairs_F2.tolist():
            self._state.copy_row(parent, child)

    def prepare(self, updates: RowUpdates, lists: StepLists | None) -> Update:
        """Merge the changes, to be applied by the step's work."""
        deltas = updates.merged_deltas()

        def take() -> None:
            for row, position, token_ids in updates.runs:
                self._state.write_tokens(row, position, token_ids)
            if len(deltas):
                self._state.write_deltas(deltas)
            if lists is not None:
                self._lists = lists

        return Update(take, lambda arrival: None)

    def gather(self, shape: StepShape) -> Gathered:
        """Gather the step's inputs without padding."""
        lists, state = self._now, self._state
        longest = -(-int(shape.context_lens.max()) // state.block_size)
        rows: Any = lists.rows
        inputs: Any = gather_arrays(state, lists.rows, lists.num_tokens, longest)
        indices_N = lists.sample_indices
        samples: Any = SampleArrays(
            rows=lists.sample_rows,
            last=np.cumsum(lists.num_tokens, dtype=np.int64)[indices_N] - 1,
            lengths=inputs.context_lens_S[indices_N].astype(np.int64),
            prompt_lens=lists.sampling.prompt_lens,
        )
        return Gathered(inputs, samples, inputs.context_lens_S, rows)

    def edit(self, logits_NV: Any, samples: Any, needs: Needs, table: object) -> Any:
        """Return the logits [N, V] unchanged: no plain row has edits."""
        return logits_NV

    def choose(self, logits_NV: Any, samples: Any, needs: Needs) -> Any:
        """Choose a token per row, int64 [N]: greedy for all, then random where requested."""
        num_rows, vocab_size = logits_NV.shape
        ids_N, values_N = np.empty(num_rows, np.int64), np.empty(num_rows, np.float32)
        needed_core().arg_max(
            ids_N.ctypes.data,
            values_N.ctypes.data,
            logits_NV.ctypes.data,
            num_rows,
            vocab_size,
            num_threads(),
        )
        flags = self._now.sampling.requested.flags
        is_random = ~flags.is_greedy
        for is_in_part in is_random & ~flags.has_filter, is_random & flags.has_filter:
            which = np.flatnonzero(is_in_part)
            if len(which):
                has_filter = bool(flags.has_filter[which[0]])
                chosen = self._choose_some(logits_NV, samples, which, has_filter=has_filter)
                ids_N[which] = chosen
        is_valid_N = np.isfinite(values_N)
        return np.where(is_valid_N, ids_N, 0), is_valid_N

    def advance(self, gathered: Gathered, ids_N: Any, is_valid_N: Any) -> None:
        """Write the tokens [N] to the result slot first, and the counters last."""
        lists, samples, state = self._now, gathered.samples, self._state
        rows_N: Any = samples.rows
        lengths_N: Any = samples.lengths
        contexts_S: Any = gathered.contexts
        if len(lists.sample_rows):
            self.results_QR[lists.result_slot, : len(ids_N)] = np.where(is_valid_N, ids_N, -1)
        state.advance(lists.rows, contexts_S, rows_N, lengths_N, ids_N)

    def _never(self, *_: Any) -> Any:
        raise NotImplementedError("no plain plan has masks, draft tokens or ranks")

    serve = prepare_masks = best_of_part = _never

    @property
    def _now(self) -> StepLists:
        assert self._lists is not None, "a step's lists are taken first"
        return self._lists

    def _choose_some(
        self, logits_NV: Floats, samples: SampleArrays, which: Indices, *, has_filter: bool
    ) -> Int64:
        """Choose tokens of the rows `which`; either all or none of them have filters."""
        logits_PV, rows_P, lengths_P = logits_NV[which], samples.rows[which], samples.lengths[which]
        ids_P = np.empty(len(which), np.int64)
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index")
        found = {name: np.ascontiguousarray(self._column(name)[rows_P]) for name in names}
        at = {name: column.ctypes.data for name, column in found.items()}
        needed_core().choose(
            ids_P.ctypes.data,
            logits_PV.ctypes.data,
            at["temperature"],
            at["top_k"] if has_filter else 0,
            at["top_p"] if has_filter else 0,
            at["min_p"] if has_filter else 0,
            len(rows_P),
            logits_PV.shape[1],
            0,
            at["seed"],
            at["sample_index"],
            lengths_P.ctypes.data,
            num_threads(),
        )
        return ids_P

    def _column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of all rows [R], float32 or int64."""
        if name in WIDE_COLUMNS:
            wide: npt.NDArray[Any] = self._state.wide_CR[WIDE_COLUMNS.index(name)]
            return wide
        column: npt.NDArray[Any] = self._state.narrow_CR[NARROW_COLUMNS.index(name)]
        return column.view(np.float32) if name in FLOATS else column
