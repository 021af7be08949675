"""Operations of a step on rows and logits, by Triton kernels.

The needs of a step's rows define a fixed sequence of launches, so that it can be recorded. The
lists of the current step lie on the device, in an inbox.

Shape legend: S scheduled rows (and slots for sampling rows), N sampling rows of the step (or
slots for them), V vocabulary, F forks.
"""

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.gpu import DTYPES
from quire.ops.host.host_memory import to_device
from quire.ops.kernels import row_deltas, step_inputs
from quire.ops.kernels.sampling import mask, verify
from quire.ops.kernels.sampling.draft_runs import draft_runs_of_step
from quire.ops.kernels.sampling.penalties import apply_penalties
from quire.ops.kernels.sampling.sampling import SamplingColumns, best_of_part, sample
from quire.ops.kernels.sampling.sampling_edits import edit_logits
from quire.ops.kernels.step_inputs import Inbox, StepBuffers
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import SampleInputs, StepInputs
from quire.ops.sampling.logit_edits import EditTable, RowMasks
from quire.runner.device import Arrival, Device, Graph
from quire.runner.gpu.sizes import Size
from quire.runner.gpu.slots import Chunk, MaskSlots, Slot, SlotContents, SlotRing
from quire.runner.gpu.step_launcher import LaunchingDevice, StepLauncher, make_launcher
from quire.runner.memory_plan import max_positions
from quire.runner.step_ops import (
    Gathered,
    Needs,
    RowUpdates,
    Sampling,
    StepLists,
    StepShape,
    Update,
)
from quire.runner.torch_ops import empty_results, narrow, penalties_of, wide

Int32 = npt.NDArray[np.int32]

NO_TICKET = 0  # of steps whose tokens are copied to the host


class KernelOps:
    """Step operations by Triton kernels, which read changes from slots of pinned memory. launches:
    the device, if recorded steps are launched by the C++ core. inbox: lists of the current step."""

    can_be_recorded = True

    def __init__(
        self,
        device: Device,
        state: RowTensors,
        vocab_size: int,
        launches: LaunchingDevice | None = None,
    ) -> None:
        self._device, self._state, self._vocab_size = device, state, vocab_size
        self.results_QR = empty_results(state)
        max_num_rows = len(state.computed_R)
        self.inbox = Inbox.empty(max_num_rows, device.device)
        self._ring = SlotRing(device, max_num_rows)
        self.launcher: StepLauncher | None = None
        if launches is not None:
            self.launcher = make_launcher(launches, state, self.inbox, self._ring)
        self._columns = sampling_columns(state)
        self._max_masks = max_positions(max_num_rows)
        self._counts_RV: torch.Tensor | None = None
        self._mask_slots: MaskSlots | None = None
        self._direct_masks: RowMasks | None = None  # of the next step, which is not recorded

    def fork(self, pairs_F2: Int32) -> None:
        """Copy rows in one launch."""
        slot, layout, state = self._ring.take(), self._ring.layout, self._state
        slot.array[layout.forks_at : layout.forks_at + pairs_F2.size] = pairs_F2.ravel()

        def work() -> list[torch.Tensor]:
            row_deltas.copy_rows(state, slot.words, layout, len(pairs_F2))
            return []

        slot.used = self._device.run(work)

    def prepare(self, updates: RowUpdates, lists: StepLists | None) -> Update:
        """Launch all chunks of the changes except the last, which goes with the step's lists."""
        ring = self._ring
        *chunks, last = ring.cut(updates)
        for chunk in chunks:
            before = ring.fill(ring.take(), chunk)

            def work(contents: SlotContents = before) -> list[torch.Tensor]:
                self._receive(contents, False)
                return []

            before.slot.used = self._device.run(work)
        slot, launcher = ring.take(), self.launcher

        def hold(arrival: Arrival) -> None:
            slot.used = arrival

        if launcher is None or lists is None:
            contents = self._fill(slot, last, lists)
            return Update(lambda: self._receive(contents, lists is not None), hold)

        def replay(graph: Graph) -> Arrival:
            return launcher.launch(slot, last, lists, graph)

        return Update(lambda: self._receive(self._fill(slot, last, lists), True), hold, replay)

    def _fill(self, slot: Slot, chunk: Chunk, lists: StepLists | None) -> SlotContents:
        """Write a chunk, and the step's lists if any, into a slot."""
        contents = self._ring.fill(slot, chunk)
        if lists is not None:
            header = len(lists.rows), len(lists.sample_rows), lists.result_slot, NO_TICKET
            arrays = lists.rows, lists.num_tokens, sample_pairs(lists)
            self._ring.write_lists(slot, header, arrays)
        return contents

    def prepare_masks(self, positions: Int32, words: Int32) -> Update:
        """Write masks into a slot, from which they are copied to the memory that recorded steps
        read. If a step with draft tokens has more masks than a recorded one can have, they are
        copied directly. positions: [M], words: [M, W]."""
        if len(positions) <= self._max_masks:
            return self._masks.prepare(positions, words)

        def take() -> None:
            masks = to_device(positions, self._state.device), to_device(words, self._state.device)
            self._direct_masks = RowMasks(*masks)

        return Update(take, lambda arrival: None)

    def gather(self, shape: StepShape) -> Gathered:
        """Gather inputs into buffers with slots for all scheduled rows and all sampling rows."""
        state, num_rows = self._state, len(shape.query_lens)
        longest = -(-int(shape.context_lens.max()) // state.block_size)
        num_row_slots, num_groups = max(num_rows, shape.num_samples), len(state.tables_GRL)
        buffers = StepBuffers.empty(
            shape.num_tokens, num_row_slots, num_groups, longest, state.device
        )
        found = step_inputs.gather_step(state, self.inbox, buffers)
        inputs = StepInputs(
            found.ids_T,
            found.positions_T,
            found.query_starts_S1[: num_rows + 1],
            found.context_lens_S[:num_rows],
            found.slots_T,
            tuple(table_SL[:num_rows] for table_SL in found.block_tables_SL),
        )
        samples = buffers.first_samples(shape.num_samples)
        return Gathered(inputs, samples, buffers.context_lens_S, self.inbox.rows(num_rows))

    def serve(self, sampling: Sampling) -> None:
        """Do nothing: the kernels read all row data from the device."""

    def edit(
        self,
        logits_NV: torch.Tensor,
        samples: SampleInputs,
        needs: Needs,
        table: EditTable | None,
    ) -> torch.Tensor:
        """Edit the logits [N, V] of all rows at once, in the model's dtype if no row has edits."""
        x_NV = logits_NV if logits_NV.dtype in DTYPES else logits_NV.float()
        if needs.edits is not None:
            assert table is not None
            indices_N = narrow(self._state, "edits").index_select(0, samples.rows)
            tokens_RM, lengths_N = self._state.tokens_RM, samples.lengths
            x_NV = edit_logits(
                x_NV, table, indices_N, tokens_RM, samples.rows, lengths_N, samples.prompt_lens
            )
        if needs.has_penalties:
            if needs.edits is None:
                x_NV = x_NV.to(torch.float32, copy=True)
            self._penalise(x_NV, samples)
        if needs.has_masks:
            masks, self._direct_masks = self._direct_masks, None
            mask.apply_masks(x_NV, masks or self._masks.of(min(len(x_NV), self._max_masks)))
        return x_NV

    def choose(
        self, logits_NV: torch.Tensor, samples: SampleInputs, needs: Needs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose in two launches; see StepOps. Return int64 [N] and bool [N]."""
        return sample(
            logits_NV, self._columns, samples.lengths, samples.rows, has_filters=needs.has_filters
        )

    def best_of_part(
        self, logits_NW: torch.Tensor, samples: SampleInputs, first: int
    ) -> torch.Tensor:
        """Choose in two launches; see StepOps. Return float64 [N, 2]."""
        return best_of_part(logits_NW, self._columns, samples.lengths, samples.rows, first)

    def advance(self, gathered: Gathered, ids_N: torch.Tensor, is_valid_N: torch.Tensor) -> None:
        """Advance the rows in one launch. ids_N, is_valid_N: [N]."""
        step_inputs.advance(
            self._state,
            self.inbox,
            gathered.contexts,
            ids_N,
            is_valid_N,
            self.results_QR,
            None if self.launcher is None else self.launcher.mail,
        )

    # ---- recorded steps with draft tokens (`verification.py`) ----

    def draft(self, size: Size) -> None:
        """See VerifyOps."""
        assert size.runs is not None, "the host drafts"
        longest = size.longest_draft
        draft_runs_of_step(self._state, self.inbox, self._drafts_R, size.rows, longest, size.runs)

    def has_drafts(self, gathered: Gathered) -> torch.Tensor:
        """See VerifyOps."""
        lens_S = gathered.inputs.query_starts_S1.diff()
        return (self._drafts_R[gathered.valid_rows(0)] > 0) & (lens_S > 0)

    def positions(self, gathered: Gathered, size: Size) -> SampleInputs:
        """See VerifyOps."""
        sizes = size.num_positions, size.longest_draft
        return verify.draft_positions(self.inbox, self._drafts_R, gathered.samples, *sizes)

    def accept(
        self, gathered: Gathered, ids_P: torch.Tensor, is_valid_P: torch.Tensor, size: Size
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See VerifyOps."""
        return verify.accept_drafts(
            self._state, self.inbox, self._drafts_R, gathered.contexts, ids_P, is_valid_P,
            size.longest_draft,
        )  # fmt: skip

    @property
    def _drafts_R(self) -> torch.Tensor:
        return narrow(self._state, "drafts")

    @property
    def _masks(self) -> MaskSlots:
        """Return the mask slots; make them at the first masks or the first recording."""
        if self._mask_slots is None:
            self._mask_slots = MaskSlots(self._device, self._max_masks, self._vocab_size)
        return self._mask_slots

    def _receive(self, contents: SlotContents, has_lists: bool) -> None:
        counts = contents.num_deltas, contents.num_runs
        words, layout = contents.slot.words, self._ring.layout
        row_deltas.receive(self._state, self.inbox, words, layout, *counts, has_lists)

    def _penalise(self, logits_NV: torch.Tensor, samples: SampleInputs) -> None:
        """Penalise all rows, in batches of the counts' size. Rows without penalties count no
        tokens."""
        state, num_rows, device = self._state, len(logits_NV), logits_NV.device
        max_rows = len(state.computed_R)
        if self._counts_RV is None:
            shape = max_rows, self._vocab_size
            self._counts_RV = torch.zeros(shape, dtype=torch.int32, device=device)
        for first in range(0, num_rows, max_rows):
            part = slice(first, first + max_rows)
            rows = samples.rows[part]
            is_penalised_N = narrow(state, "penalised").index_select(0, rows)
            apply_penalties(
                logits_NV[part],
                torch.arange(len(rows), device=device),
                state.tokens_RM,
                samples.lengths[part] * is_penalised_N,
                samples.prompt_lens[part],
                penalties_of(state, rows),
                rows_P=rows,
                counts_PV=self._counts_RV,
            )


def sampling_columns(state: RowTensors) -> SamplingColumns:
    """Return views of the state's columns, as the sampling kernel reads them."""
    return SamplingColumns(
        temperature=narrow(state, "temperature"),
        top_k=wide(state, "top_k"),
        top_p=narrow(state, "top_p"),
        min_p=narrow(state, "min_p"),
        seeds=wide(state, "seed"),
        sample_index=wide(state, "sample_index"),
    )


def sample_pairs(lists: StepLists) -> Int32:
    """Return [N, 2] of sampling rows and their positions among the scheduled rows."""
    pairs: Int32 = np.stack((lists.sample_rows, lists.sample_indices), axis=1).astype(np.int32)
    return pairs
