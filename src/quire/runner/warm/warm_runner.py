"""A runner without torch: its forward pass runs the saved programs of the core on arrays.

Plans, rows and the order of a step are the same as for every runner (`steps.py`).

Shape legend: T tokens of the step, N sampling rows, D model dim, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.ops.attention.core_calls import StepAddresses, cut_step
from quire.ops.host.native import needed_core
from quire.ops.host.native_types import CorePlan, CoreProgram
from quire.ops.host.spare_memory import SPARE
from quire.ops.host.threads import num_threads
from quire.ops.rows.row_arrays import RowArrays
from quire.ops.trace.program_parts import ProgramParts
from quire.runner.attachment import ForwardPart
from quire.runner.device import HostDevice
from quire.runner.rows import DeviceRows
from quire.runner.sampling.sampler import Sampler, Vocabulary
from quire.runner.step_ops import Needs, StepShape
from quire.runner.steps import StepRunner
from quire.runner.warm.array_ops import ArrayOps
from quire.runner.warm.blocks import Bytes, WarmBlocks
from quire.runner.warm.start_file import Start

NOTHING_RETAINED = (0, 0, 0, 0)


class WarmRunner(StepRunner):
    """Runner of plain plans (`conditions.is_plain`), with the bits of `ModelRunner`."""

    def __init__(self, start: Start, arrays: RowArrays, blocks: WarmBlocks) -> None:
        ops, device = ArrayOps(arrays), HostDevice("cpu", np.array)
        self._vocab_size = start.head.widths[0]
        sampler = Sampler(ops, len(arrays.computed_R), Vocabulary(self._vocab_size))
        super().__init__(None, blocks, DeviceRows(device, arrays, ops), sampler, device)
        self._start = start
        self._plans: list[CorePlan] = [needed_core().AttentionPlan() for _ in start.heads]
        self._model, self._head = self._program(start.model), self._program(start.head)

    def hidden(
        self, inputs: Any, shape: StepShape, backend: Any, parts: Sequence[ForwardPart] = ()
    ) -> Any:
        """See StepRunner; float32. A plain step has no parts. inputs: StepArrays."""
        hidden_TD = np.empty((len(inputs.ids_T), self._start.hidden_size), np.float32)
        groups = []
        for plan, (group, heads) in zip(self._plans, self._start.heads, strict=True):
            tables_SL = inputs.tables_GSL[group]
            addresses = StepAddresses(
                tables_SL.ctypes.data,
                tables_SL.shape[1],
                inputs.query_starts_S1.ctypes.data,
                inputs.context_lens_S.ctypes.data,
                len(inputs.context_lens_S),
            )
            cut_step(plan, addresses, backend.groups[group], heads, backend.block_size)
            groups.append((plan, inputs.slots_GT[group].ctypes.data))
        self._model.run(
            len(hidden_TD),
            inputs.ids_T.ctypes.data,
            inputs.positions_T.ctypes.data,
            [hidden_TD.ctypes.data],
            groups,
            NOTHING_RETAINED,
            num_threads(),
        )
        return hidden_TD

    def logits(self, hidden_TD: Any, last_N: Any, needs: Needs) -> Any:
        """See StepRunner; float32."""
        hidden_ND = hidden_TD[last_N]
        num_rows = len(hidden_ND)
        memory = SPARE.empty(4 * num_rows * self._vocab_size)
        logits_NV = memory.view(np.float32).reshape(num_rows, self._vocab_size)
        unused = np.zeros(num_rows, np.int64)
        outside = [logits_NV.ctypes.data, hidden_ND.ctypes.data]
        at = unused.ctypes.data
        self._head.run(num_rows, at, at, outside, [], NOTHING_RETAINED, num_threads())
        return logits_NV

    @property
    def mapped(self) -> Sequence[Bytes]:
        """Return the mapped bytes of the saved start."""
        return self._start.data

    def _program(self, parts: ProgramParts) -> CoreProgram:
        start = self._start
        data = [each.ctypes.data for each in start.data]

        def add_layers(program: CoreProgram) -> None:
            for position in start.layers:
                program.add_layer(position.given, self.backend.layer(position))

        return parts.assemble(start.variant, add_layers, lambda at: data[at[0]] + at[1])
