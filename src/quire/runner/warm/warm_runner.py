"""Carries out plans without torch: the kept programs of the core between arrays of the host.

Shape legend: T tokens of the step, S scheduled rows, N sampling rows, D model dim, V vocabulary.
"""

import time

import numpy as np
import numpy.typing as npt

from quire.base.plan import Plan, StepResult
from quire.ops.attention.core_calls import StepAddresses, cut_step
from quire.ops.native import needed_core
from quire.ops.native_types import CorePlan, CoreProgram
from quire.ops.program_parts import ProgramParts
from quire.ops.row_arrays import StepArrays, gather_arrays
from quire.ops.spare_memory import SPARE
from quire.ops.threads import num_threads
from quire.runner.plan_parts import Moves
from quire.runner.row_errors import NOT_FINITE
from quire.runner.warm.blocks import WarmBlocks
from quire.runner.warm.rows import WarmRows
from quire.runner.warm.start_file import Start

Floats = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

NOTHING_KEPT = (0, 0, 0, 0)


class WarmRunner:
    """Does for plain plans (`is_plain`) what `ModelRunner` does, with the same bits."""

    def __init__(self, start: Start, rows: WarmRows, blocks: WarmBlocks) -> None:
        self.rows, self.blocks = rows, blocks
        self._start = start
        self._moves = Moves(blocks)
        self._plans: list[CorePlan] = [needed_core().AttentionPlan() for _ in start.heads]
        self._model = self._program(start.model)
        self._head = self._program(start.head)
        self._vocab_size = start.head.widths[0]

    def run(self, plan: Plan) -> StepResult:
        """Carry out a plan. Whatever it raises, the rows' counters have not moved."""
        began = time.perf_counter()
        self.rows.take(plan)
        self._moves.carry_out(plan)
        tokens_N = np.empty(0, np.int64)
        if len(plan.rows):
            tokens_N = self._step(plan)
        failed = plan.sample_rows[tokens_N < 0].tolist()
        return StepResult(
            step_id=plan.step_id,
            token_ids=np.maximum(tokens_N, 0).astype(np.int32).reshape(-1, 1),
            num_accepted=np.ones(len(tokens_N), np.int32),
            row_errors=dict.fromkeys(failed, NOT_FINITE),
            duration_s=time.perf_counter() - began,
        )

    def _step(self, plan: Plan) -> Int64:
        """Compute and sample; returns the tokens, -1 where there was none to choose."""
        arrays, rows_N = self.rows.arrays, plan.sample_rows
        longest = int((plan.computed_bound + plan.num_tokens).max())
        step = gather_arrays(arrays, plan.rows, plan.num_tokens, -(-longest // arrays.block_size))
        hidden_TD = self._forward(step)
        places_N = plan.sample_places
        lengths_N = step.context_lens_S[places_N].astype(np.int64)
        ids_N = tokens_N = np.empty(0, np.int64)
        if len(rows_N):
            last_N = np.cumsum(plan.num_tokens, dtype=np.int64)[places_N] - 1
            logits_NV = self._logits(hidden_TD[last_N])
            ids_N, is_valid_N = self._choose(logits_NV, rows_N, lengths_N)
            ids_N = np.where(is_valid_N, ids_N, 0)
            tokens_N = np.where(is_valid_N, ids_N, -1)
        arrays.advance(plan.rows, step.context_lens_S, rows_N, lengths_N, ids_N)
        return tokens_N

    def _forward(self, step: StepArrays) -> Floats:
        """Compute hidden states, [T, D], behind the last norm."""
        hidden_TD = np.empty((len(step.ids_T), self._start.hidden_size), np.float32)
        groups = []
        for plan, (group, heads) in zip(self._plans, self._start.heads, strict=True):
            tables_SL = step.tables_GSL[group]
            addresses = StepAddresses(
                tables_SL.ctypes.data,
                tables_SL.shape[1],
                step.query_starts_S1.ctypes.data,
                step.context_lens_S.ctypes.data,
                len(step.context_lens_S),
            )
            cut_step(plan, addresses, self.blocks.groups[group], heads, self.blocks.block_size)
            groups.append((plan, step.slots_GT[group].ctypes.data))
        self._model.run(
            len(hidden_TD),
            step.ids_T.ctypes.data,
            step.positions_T.ctypes.data,
            [hidden_TD.ctypes.data],
            groups,
            NOTHING_KEPT,
            num_threads(),
        )
        return hidden_TD

    def _logits(self, hidden_ND: Floats) -> Floats:
        num_rows = len(hidden_ND)
        memory = SPARE.empty(4 * num_rows * self._vocab_size)
        logits_NV = memory.view(np.float32).reshape(num_rows, self._vocab_size)
        unused = np.zeros(num_rows, np.int64)
        outside = [logits_NV.ctypes.data, hidden_ND.ctypes.data]
        at = unused.ctypes.data
        self._head.run(num_rows, at, at, outside, [], NOTHING_KEPT, num_threads())
        return logits_NV

    def _choose(
        self, logits_NV: Floats, rows_N: npt.NDArray[np.int32], lengths_N: Int64
    ) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Make the greedy choice, with that of the rows that sample written over it; whether there
        was anything to choose."""
        ids_N = np.empty(len(rows_N), np.int64)
        values_N = np.empty(len(rows_N), np.float32)
        needed_core().arg_max(
            ids_N.ctypes.data,
            values_N.ctypes.data,
            logits_NV.ctypes.data,
            len(rows_N),
            self._vocab_size,
            num_threads(),
        )
        flags = self.rows.flags.at(rows_N)
        for has_filter in False, True:
            which = np.flatnonzero(~flags.is_greedy & (flags.has_filter == has_filter))
            if len(which):
                some = (logits_NV[which], rows_N[which], lengths_N[which])
                ids_N[which] = self._choose_some(*some, has_filter=has_filter)
        return ids_N, np.isfinite(values_N)

    def _choose_some(
        self,
        logits_PV: Floats,
        rows_P: npt.NDArray[np.int32],
        lengths_P: Int64,
        *,
        has_filter: bool,
    ) -> Int64:
        ids_P = np.empty(len(rows_P), np.int64)
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index")
        found = {name: np.ascontiguousarray(self.rows.column(name)[rows_P]) for name in names}
        at = {name: column.ctypes.data for name, column in found.items()}
        needed_core().choose(
            ids_P.ctypes.data,
            logits_PV.ctypes.data,
            at["temperature"],
            at["top_k"] if has_filter else 0,
            at["top_p"] if has_filter else 0,
            at["min_p"] if has_filter else 0,
            len(rows_P),
            self._vocab_size,
            0,
            at["seed"],
            at["sample_index"],
            lengths_P.ctypes.data,
            num_threads(),
        )
        return ids_P

    def _program(self, parts: ProgramParts) -> CoreProgram:
        start = self._start
        data = [each.ctypes.data for each in start.data]

        def add_layers(program: CoreProgram) -> None:
            for place in start.layers:
                program.add_layer(place.given, self.blocks.layer(place))

        return parts.assemble(start.variant, add_layers, lambda at: data[at[0]] + at[1])
