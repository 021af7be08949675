"""Passes of a draft model by kernels: all passes of an order as one list of launches.

`drafting.py` explains the passes. Here the device has all numbers of an order, so that a graph can
hold the launches. Rows, first tokens and numbers of tokens are in an inbox, as a step's are. The
numbers of draft tokens are in the rows' column "drafts", which the next step with drafts rewrites.

The first pass has token slots for a number of tokens, and each further pass has one for each row
slot. A row slot that drafts no longer writes no keys and no token; its results are ignored.

    size     rows, tokens of the first pass, draft tokens of a row
    graph    gather -> first pass -> choose -> store | inputs -> further pass -> choose -> store ...

An order uses the smallest graph that has room for it. A size's first order is launched directly,
the next one is recorded. The least recently used graph is dropped; its size must then occur often.
Orders with more tokens than a recorded step are launched directly.

Shape legend: as in `drafting.py`, and S row slots, N = S.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import DraftOrder
from quire.ops.embedding import select_rows
from quire.ops.host.host_memory import to_device
from quire.ops.kernels.step_inputs import advance
from quire.ops.rows.row_arrays import COMPUTED, NARROW
from quire.ops.rows.row_state import RowTensors
from quire.ops.rows.step_inputs import SampleInputs, StepInputs
from quire.runner.device import Arrival
from quire.runner.gpu.compiling import compile_all
from quire.runner.gpu.graphs import DROPPED_TIMES, FIRST_TIMES
from quire.runner.gpu.kernel_ops import KernelOps
from quire.runner.gpu.pieces import Pieces, record
from quire.runner.gpu.sizes import WARM_ROWS
from quire.runner.memory_plan import MIXED_TOKENS, ladder, max_mixed_tokens
from quire.runner.model_runner import ModelRunner
from quire.runner.rows import NARROW_COLUMNS
from quire.runner.step_ops import (
    Gathered,
    Needs,
    RowUpdates,
    Sampling,
    SamplingFlags,
    SamplingRequests,
    StepLists,
    StepShape,
)

logger = logging.getLogger("quire")

Int32 = npt.NDArray[np.int32]

DRAFTS = NARROW_COLUMNS.index("drafts")


class OrderSize(NamedTuple):
    """Numbers of row slots, of token slots of the first pass, and of draft tokens of a row.
    has_filters: whether rows may sample with filters."""

    rows: int
    tokens: int
    drafts: int
    has_filters: bool = False

    def serves(self, other: "OrderSize") -> bool:
        """Return whether it has room for an order of the other size and does not much more."""
        return (
            self.rows >= other.rows
            and other.tokens <= self.tokens <= max(64, 2 * other.tokens)
            and self.drafts >= other.drafts
            and self.has_filters >= other.has_filters
        )


@dataclass
class RecordedOrder:
    """Graph of a size, once it is recorded. last_use: number of the last order that used it."""

    last_use: int
    pieces: Pieces = field(default_factory=Pieces)


class DraftKernels:
    """Passes of a drafter by kernels, directly or as graphs. drafter, target: see DraftPasses.
    state: rows with counters of their own. groups: the drafter's cache groups. max_graphs: maximum
    number of graphs; 0 to launch all orders directly. max_read: maximum number of tokens of a step,
    whose states the drafter reads."""

    def __init__(
        self,
        drafter: Any,
        target: Any,
        runner: ModelRunner,
        state: RowTensors,
        groups: range,
        max_graphs: int,
        max_read: int,
    ) -> None:
        self._drafter, self._target, self._runner = drafter, target, runner
        self._state, self._groups, self._max_graphs = state, groups, max_graphs
        self._reads, self._max_read = int(drafter.num_read > 0), max_read
        self._ops = KernelOps(runner.device, state, runner.sampler.vocab_size)
        num_rows = len(state.computed_R)
        self._rows_ladder, self._max_tokens = ladder(num_rows), max_mixed_tokens(num_rows)
        self._read_from_S = torch.zeros(num_rows, dtype=torch.int64, device=state.device)
        self._recorded: dict[OrderSize, RecordedOrder] = {}
        self._times: dict[OrderSize, int] = {}
        self._num_orders = 0

    def run(self, order: DraftOrder, block_deltas: Int32) -> Arrival:
        """Launch an order's passes; the draft tokens arrive, int32 [S, K]. block_deltas: changes of
        block tables, [D, 4]."""
        size = self._size_of(order)
        recorded = self._find(size)
        update = self._ops.prepare(self._updates(order, block_deltas), self._lists(order))

        def work() -> list[torch.Tensor]:
            if self._reads:
                read_from = to_device(order.read_from.astype(np.int64), self._state.device)
                self._read_from_S[: len(read_from)] = read_from
            if recorded is None:
                return [self._launch(size)]
            recorded.pieces.end()
            return [tensor.clone() for tensor in recorded.pieces.outputs]

        return self._runner.rows.run_with(update, work)

    @torch.inference_mode()
    def warm_up(self, num_drafts: int) -> None:
        """Record sizes that together have room for all orders of this many draft tokens that can be
        recorded, largest first."""
        max_rows = self._rows_ladder[-1]
        rows = sorted({*(min(each, max_rows) for each in WARM_ROWS), max_rows}, reverse=True)
        sizes = [OrderSize(each, each * (1 + num_drafts), num_drafts, True) for each in rows]
        sizes.insert(0, OrderSize(max_rows, max(MIXED_TOKENS[-1], max_rows), num_drafts, True))
        sizes = [size for size in sizes if self._may_record(size)]
        compile_all(self._runner.device, [partial(self._launch, size) for size in sizes])
        for size in sizes:
            self._record(size)

    def _size_of(self, order: DraftOrder) -> OrderSize:
        """Return the size of an order. An order after a step without prompts has at most one token
        more than it drafts for each row."""
        num_rows, num_tokens = len(order.rows), int(order.num_tokens.sum())
        drafts = int(order.num_draft_tokens.max(initial=0))
        rows = next(each for each in self._rows_ladder if each >= num_rows)
        ends = [rows * (1 + drafts), *MIXED_TOKENS]
        room = [each for each in ends if each >= max(num_tokens, rows)]
        flags = self._runner.sampler.flags
        has_filters = bool(flags.has_filter[order.rows].any())
        return OrderSize(rows, min(room, default=max(num_tokens, rows)), drafts, has_filters)

    # ---- graphs ----

    def _find(self, size: OrderSize) -> RecordedOrder | None:
        """Return a graph with room for an order of this size; record one at its second
        occurrence."""
        self._num_orders += 1
        if self._may_record(size):
            self._times[size] = self._times.get(size, 0) + 1
            if self._times[size] > FIRST_TIMES and size not in self._recorded:
                self._record(size)
        found = [each for each in self._recorded if each.serves(size)]
        if not found:
            return None
        recorded = self._recorded[size if size in self._recorded else min(found)]
        recorded.last_use = self._num_orders
        return recorded

    def _may_record(self, size: OrderSize) -> bool:
        return self._max_graphs > 0 and size.tokens <= self._max_tokens

    def _record(self, size: OrderSize) -> None:
        """Run an order without rows, so that all kernels are compiled; then record it."""
        if self._reads and not len(self._target.recorded_inputs(self._max_read)):
            return  # no step has run yet
        if len(self._recorded) >= self._max_graphs:
            oldest = min(self._recorded, key=lambda each: self._recorded[each].last_use)
            self._runner.device.run(list).wait()
            del self._recorded[oldest]
            self._times[oldest] = -DROPPED_TIMES
        lists = self._lists(DraftOrder(*[np.zeros(0, np.int32)] * 7))
        recorded, runner = RecordedOrder(self._num_orders), self._runner

        def launch(*_: object) -> list[torch.Tensor]:
            return [self._launch(size)]

        def work() -> list[torch.Tensor]:
            launch()
            recorded.pieces = record(runner.device, runner.backend, launch, in_pieces=False)
            return []

        try:
            runner.rows.run_with(self._ops.prepare(RowUpdates(), lists), work)
            self._recorded[size] = recorded
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError):
                self._max_graphs = len(self._recorded)
            self._times[size] = -1 << 30
            logger.warning(
                "draft passes of %s could not be recorded: they run slower.", size, exc_info=True
            )

    # ---- an order ----

    def _updates(self, order: DraftOrder, block_deltas: Int32) -> RowUpdates:
        """Return the changes of rows: counters, numbers of draft tokens, spare blocks."""
        deltas = np.zeros((2, len(order.rows), 4), np.int32)
        deltas[:, :, 1] = order.rows
        deltas[0, :, 0], deltas[0, :, 3] = COMPUTED, order.first
        deltas[1, :, 0], deltas[1, :, 2], deltas[1, :, 3] = NARROW, DRAFTS, order.num_draft_tokens
        return RowUpdates([*deltas, block_deltas])

    def _lists(self, order: DraftOrder) -> StepLists:
        flags = SamplingFlags.of_rows(len(order.rows))
        lengths = order.first + order.num_tokens
        nothing = np.zeros(len(order.rows), np.int64)
        sampling = Sampling(SamplingRequests(order.rows, flags), lengths, nothing)
        return StepLists(order.rows, order.num_tokens, sampling, np.arange(len(order.rows)), 0)

    def _launch(self, size: OrderSize) -> torch.Tensor:
        """Launch all passes of the order in the inbox. Return the draft tokens, int32 [S, k]; -1
        where there is none."""
        state = self._state
        query_lens = np.zeros(size.rows, np.int32)
        query_lens[0] = size.tokens
        contexts = np.full(size.rows, state.tokens_RM.shape[1], np.int32)
        gathered = self._ops.gather(StepShape(query_lens, contexts, size.rows))
        rows_S = gathered.valid_rows(0)
        drafts_S = state.narrow_CR[DRAFTS][rows_S]
        drafts_S = drafts_S * (gathered.inputs.query_starts_S1.diff() > 0)
        known_S = gathered.samples.lengths + self._reads
        out_SD = self._first_pass(gathered, StepShape(query_lens, contexts, 0))
        tables = tuple(table_RL[rows_S] for table_RL in state.tables_GRL)
        found = []
        for num in range(size.drafts):
            is_drafting_S = drafts_S > num
            if num > 0:
                inputs = self._inputs(rows_S, known_S + num - 1, is_drafting_S, tables)
                self._prepare(inputs, np.ones(size.rows, np.int32), contexts)
                ids_S = self._ids(rows_S, inputs)
                out_SD = self._drafter.further(
                    ids_S, inputs.positions_T, out_SD, self._runner.backend
                )
            lengths_S = known_S + num
            found.append(self._choose(gathered, out_SD, lengths_S, is_drafting_S, size))
        if not found:
            return torch.empty(size.rows, 0, dtype=torch.int32, device=state.device)
        return torch.stack(found, dim=1)

    def _first_pass(self, gathered: Gathered, shape: StepShape) -> torch.Tensor:
        """Return the output at each row's last token, [S, E]."""
        inputs, read_TF = gathered.inputs, None
        self._prepare(inputs, shape.query_lens, shape.context_lens)
        ids_T = inputs.ids_T
        if self._reads:
            slots_T = inputs.row_slots().clamp_(max=len(gathered.rows) - 1)
            ids_T = self._ids(gathered.valid_rows(0)[slots_T], inputs)
            left_TF = self._target.recorded_inputs(self._max_read)
            starts_S = self._read_from_S[: len(gathered.rows)] - inputs.query_starts_S1[:-1]
            at_T = torch.arange(len(ids_T), device=ids_T.device) + starts_S[slots_T]
            read_TF = select_rows(left_TF, at_T.clamp_(0, len(left_TF) - 1))
        out_TD = self._drafter.first(ids_T, inputs.positions_T, read_TF, self._runner.backend)
        found: torch.Tensor = select_rows(out_TD, gathered.samples.last)
        return found

    def _inputs(
        self,
        rows_S: torch.Tensor,
        positions_S: torch.Tensor,
        is_drafting_S: torch.Tensor,
        tables: Sequence[torch.Tensor],
    ) -> StepInputs:
        """Return the inputs of a further pass, one token for each row slot. Slots that do not draft
        see one token and write nothing."""
        size = self._state.block_size
        positions_S = (positions_S - self._reads).where(is_drafting_S, 0)
        blocks_S1, offsets_S = (positions_S // size)[:, None], positions_S % size
        slots = tuple(
            (table_SL.gather(1, blocks_S1)[:, 0] * size + offsets_S).where(is_drafting_S, -1)
            for table_SL in tables
        )
        starts_S1 = torch.arange(len(rows_S) + 1, dtype=torch.int32, device=rows_S.device)
        contexts_S = (positions_S + 1).int()
        ids_S = self._state.tokens_RM[rows_S, positions_S].long()
        return StepInputs(ids_S, positions_S, starts_S1, contexts_S, slots, tuple(tables))

    def _ids(self, rows_T: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Return the ids that the drafter reads at these positions, int64 [T]."""
        if not self._reads:
            return inputs.ids_T
        return self._state.tokens_RM[rows_T, inputs.positions_T + 1].long()

    def _prepare(self, inputs: StepInputs, query_lens: Int32, contexts: Int32) -> None:
        step = self._runner.attention_step(inputs, StepShape(query_lens, contexts, 0))
        self._runner.backend.prepare(replace(step, groups=self._groups))

    def _choose(
        self,
        gathered: Gathered,
        out_SD: torch.Tensor,
        lengths_S: torch.Tensor,
        is_drafting_S: torch.Tensor,
        size: OrderSize,
    ) -> torch.Tensor:
        """Choose the next token of each row slot that drafts and append it to its row. Return it,
        int32 [S]; -1 where there is none."""
        needs, vocabulary = Needs(has_filters=size.has_filters), self._runner.sampler.vocabulary
        logits_SV = vocabulary.needed(self._drafter.logits(out_SD), needs).float().contiguous()
        samples, state = gathered.samples, self._state
        samples = SampleInputs(samples.rows, samples.last, lengths_S, samples.prompt_lens)
        ids_S, is_valid_S = vocabulary.choose(self._ops, logits_SV, samples, needs)
        # A row stores no token after its last position.
        contexts_S = lengths_S.where(is_drafting_S, state.tokens_RM.shape[1]).int()
        advance(state, self._ops.inbox, contexts_S, ids_S, is_valid_S, self._ops.results_QR)
        return ids_S.where(is_valid_S & is_drafting_S, -1).int()
