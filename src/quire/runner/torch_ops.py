"""Step operations by torch on any device, with the C++ core on a CPU.

Kernels are tested against them. Only rows that request a feature cost time for it. No operation
waits for the device, except filters on a CPU, which is the host, if more than the largest logits
may pass (`ops/sampling/choice.py`).

Shape legend: S scheduled rows, N sampling rows, V vocabulary, M token positions of a row, F forks.
"""

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.host.host_memory import to_device
from quire.ops.rows import row_state
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import SampleInputs, gather_step
from quire.ops.sampling.choice import Filters, Streams, choose, scores_of_part
from quire.ops.sampling.logit_edits import EditTable, RowMasks, apply_edits, apply_masks
from quire.ops.sampling.penalties import Penalties, apply_penalties
from quire.ops.sampling.top_k import arg_max
from quire.runner.device import Device
from quire.runner.rows import FLOATS, NARROW_COLUMNS, WIDE_COLUMNS
from quire.runner.step_ops import (
    NUM_RESULTS,
    Gathered,
    Needs,
    RowUpdates,
    Sampling,
    StepLists,
    StepShape,
    Update,
)

Int32 = npt.NDArray[np.int32]
Indices = npt.NDArray[np.intp]


def empty_results(state: RowTensors) -> torch.Tensor:
    """Allocate the slots for the tokens of the last steps."""
    shape = NUM_RESULTS, len(state.computed_R)
    return torch.zeros(shape, dtype=torch.int32, device=state.device)


def narrow(state: RowTensors, name: str) -> torch.Tensor:
    """Return a column of all rows, [R]: float32 for FLOATS, else int32."""
    column_R = state.narrow_CR[NARROW_COLUMNS.index(name)]
    return column_R.view(torch.float32) if name in FLOATS else column_R


def wide(state: RowTensors, name: str) -> torch.Tensor:
    """Return a column of all rows, int64 [R]."""
    return state.wide_CR[WIDE_COLUMNS.index(name)]


def penalties_of(state: RowTensors, rows_N: torch.Tensor) -> Penalties:
    """Return the penalties of these rows, [N]."""
    names = ("presence", "frequency", "repetition")
    return Penalties(*(narrow(state, name).index_select(0, rows_N) for name in names))


class TorchOps:
    """Step operations by torch; the current step's lists are on the host."""

    can_be_recorded = False

    def __init__(self, device: Device, state: RowTensors) -> None:
        self._device, self._state = device, state
        self.results_QR = empty_results(state)
        self._lists: StepLists | None = None
        self._sampling: Sampling | None = None
        self._masks: RowMasks | None = None

    def fork(self, pairs_F2: Int32) -> None:
        """Copy rows, as pairs (parent, child)."""

        def work() -> list[torch.Tensor]:
            row_state.copy_rows(self._state, pairs_F2)
            return []

        self._device.run(work)

    def prepare(self, updates: RowUpdates, lists: StepLists | None) -> Update:
        """Merge the changes, to be applied by the step's work."""
        deltas, runs = updates.merged_deltas(), [run for run in updates.runs if len(run[2]) > 1]
        single = [(row, at, int(ids[0])) for row, at, ids in updates.runs if len(ids) == 1]

        def take() -> None:
            for row, position, token_ids in runs:
                row_state.write_tokens(self._state, row, position, token_ids)
            if single:
                row_state.write_single_tokens(self._state, np.array(single, np.int64))
            if len(deltas):
                row_state.write_deltas(self._state, deltas)
            if lists is not None:
                self._lists = lists
                self.serve(lists.sampling)

        return Update(take, lambda arrival: None)

    def prepare_masks(self, positions: Int32, words: Int32) -> Update:
        """Store the masks; on a CPU they are read in place."""

        def take() -> None:
            device = self._state.device
            self._masks = RowMasks(to_device(positions, device), to_device(words, device))

        return Update(take, lambda arrival: None)

    def gather(self, shape: StepShape) -> Gathered:
        """Gather the step's inputs without padding."""
        lists, state = self._now, self._state
        longest = -(-int(shape.context_lens.max()) // state.block_size)
        inputs = gather_step(state, lists.rows, lists.num_tokens, longest)
        ends = np.cumsum(lists.num_tokens, dtype=np.int64)
        rows_N, indices_N = self._index(lists.sample_rows), self._index(lists.sample_indices)
        samples = SampleInputs(
            rows=rows_N,
            last=self._index(ends[lists.sample_indices] - 1),
            lengths=inputs.context_lens_S[indices_N].long(),
            prompt_lens=to_device(lists.sampling.prompt_lens, state.device),
        )
        return Gathered(inputs, samples, inputs.context_lens_S, self._index(lists.rows))

    def serve(self, sampling: Sampling) -> None:
        """Store the sampling rows for `edit` and `choose`."""
        self._sampling = sampling

    def edit(
        self,
        logits_NV: torch.Tensor,
        samples: SampleInputs,
        needs: Needs,
        table: EditTable | None,
    ) -> torch.Tensor:
        """Apply lists, biases and penalties to a float32 copy of logits [N, V], masks in place."""
        logits_NV = logits_NV.float().contiguous()
        if needs.makes_copy:
            logits_NV = logits_NV.clone()
            self._edit(logits_NV, samples, table)
        if needs.has_masks:
            assert self._masks is not None, "a step's masks are taken first"
            apply_masks(logits_NV, self._masks)
        return logits_NV

    def _edit(
        self, logits_NV: torch.Tensor, samples: SampleInputs, table: EditTable | None
    ) -> None:
        sampling, tokens_RM = self._served, self._state.tokens_RM
        requested, lengths = sampling.requested, sampling.lengths
        for n, span in requested.spans.items():
            assert table is not None
            tokens_M, num_prompt_tokens = tokens_RM[requested.rows[n]], int(sampling.prompt_lens[n])
            apply_edits(logits_NV[n], table, span, tokens_M, samples.lengths[n], num_prompt_tokens)
        penalised = np.flatnonzero(requested.flags.has_penalties)
        if len(penalised) > 0:
            which_P = self._index(penalised)
            rows_P = samples.rows[which_P]
            apply_penalties(
                logits_NV,
                which_P,
                tokens_RM[rows_P, : int(lengths[penalised].max())],
                samples.lengths[which_P],
                samples.prompt_lens[which_P],
                penalties_of(self._state, rows_P),
            )

    def choose(
        self, logits_NV: torch.Tensor, samples: SampleInputs, needs: Needs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose a token per row, int64 [N]: greedy for all, then random where requested."""
        best_N, values_N = arg_max(logits_NV)
        flags = self._served.requested.flags
        is_random, ids_N = ~flags.is_greedy, best_N
        if is_random.any():
            ids_N = best_N.clone()
            for is_in_part in is_random & ~flags.has_filter, flags.has_filter:
                which = np.flatnonzero(is_in_part)
                if len(which) > 0:
                    index = self._index(which)
                    ids_N[index] = self._choose_some(logits_NV, samples, which, index)
        is_valid_N = values_N.isfinite()
        return torch.where(is_valid_N, ids_N, 0), is_valid_N

    def best_of_part(
        self, logits_NW: torch.Tensor, samples: SampleInputs, first: int
    ) -> torch.Tensor:
        """Choose as `choose` does, and score the chosen tokens; float64 [N, 2]."""
        best_N, peaks_N = arg_max(logits_NW)
        temperatures_N, streams = self._streams(samples.rows, samples.lengths)
        ids_N, which = best_N, np.flatnonzero(~self._served.requested.flags.is_greedy)
        if len(which) > 0:
            index = self._index(which)
            some_NW = logits_NW if len(which) == len(logits_NW) else logits_NW[index]
            chosen = choose(some_NW, temperatures_N[index], streams.of(index), first=first)
            ids_N = best_N.index_copy(0, index, chosen)
        scores_N = scores_of_part(logits_NW, ids_N, peaks_N, temperatures_N, streams, first)
        return torch.stack((scores_N, (ids_N + first).double()), dim=1)

    def advance(self, gathered: Gathered, ids_N: torch.Tensor, is_valid_N: torch.Tensor) -> None:
        """Write the tokens [N] to the result slot first, and the counters last."""
        lists, samples = self._now, gathered.samples
        if len(lists.sample_rows):
            self.results_QR[lists.result_slot, : len(ids_N)] = torch.where(is_valid_N, ids_N, -1)
        row_state.advance(
            self._state, gathered.rows, gathered.contexts, samples.rows, samples.lengths, ids_N
        )

    @property
    def _now(self) -> StepLists:
        assert self._lists is not None, "a step's lists are taken first"
        return self._lists

    @property
    def _served(self) -> Sampling:
        assert self._sampling is not None, "a step's row comes first"
        return self._sampling

    def _choose_some(
        self, logits_NV: torch.Tensor, samples: SampleInputs, which: Indices, index: torch.Tensor
    ) -> torch.Tensor:
        """Choose tokens of the rows `which`; either all or none of them have filters."""
        state, flags = self._state, self._served.requested.flags
        some_NV = logits_NV if len(which) == len(logits_NV) else logits_NV[index]
        rows = samples.rows[index]
        temperatures, streams = self._streams(rows, samples.lengths[index])
        if not flags.has_filter[which[0]]:
            return choose(some_NV, temperatures, streams)
        top_k = flags.top_k[which]
        largest_k = int(top_k.max()) if (top_k > 0).all() else None
        columns = wide(state, "top_k"), narrow(state, "top_p"), narrow(state, "min_p")
        filters = Filters(*(column[rows] for column in columns))
        return choose(some_NV, temperatures, streams, filters, largest_k)

    def _streams(self, rows: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, Streams]:
        """Return temperatures and noise of rows of these lengths, [N]."""
        state = self._state
        seeds, sample_index = wide(state, "seed")[rows], wide(state, "sample_index")[rows]
        return narrow(state, "temperature")[rows], Streams(seeds, sample_index, lengths)

    def _index(self, values: npt.NDArray[np.signedinteger]) -> torch.Tensor:
        return to_device(values.astype(np.int64), self._state.device)
