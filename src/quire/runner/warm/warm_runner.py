"""A runner without torch: its forward pass runs programs of the core on arrays.

Plans, rows and the order of a step are the same as for every runner (`steps.py`). An earlier
start has saved the programs, or this start has traced them.

Shape legend: T tokens of the step, N sampling rows, D model dim, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class PlainPrograms:
    """Programs of a model's forward pass and of its head.

    heads: cache groups of the forward pass, and the query heads of each KV head. owner: holds the
    memory that the programs point to. mapped: the part of it that is mapped from a file.
    """

    model: CoreProgram
    head: CoreProgram
    hidden_size: int
    vocab_size: int
    heads: Sequence[tuple[int, int]]
    owner: object
    mapped: Sequence[Bytes] = ()


class WarmRunner(StepRunner):
    """Runner of plain plans (`conditions.is_plain`), with the bits of `ModelRunner`."""

    def __init__(self, programs: PlainPrograms, arrays: RowArrays, blocks: WarmBlocks) -> None:
        ops, device = ArrayOps(arrays), HostDevice("cpu", np.array)
        sampler = Sampler(ops, len(arrays.computed_R), Vocabulary(programs.vocab_size))
        super().__init__(None, blocks, DeviceRows(device, arrays, ops), sampler, device)
        self._plans: list[CorePlan] = [needed_core().AttentionPlan() for _ in programs.heads]
        self._programs: PlainPrograms | None = programs
        self.mapped = programs.mapped

    def hidden(
        self, inputs: Any, shape: StepShape, backend: Any, parts: Sequence[ForwardPart] = ()
    ) -> Any:
        """See StepRunner; float32. A plain step has no parts. inputs: StepArrays."""
        programs = self._needed
        hidden_TD = np.empty((len(inputs.ids_T), programs.hidden_size), np.float32)
        groups = []
        for plan, (group, heads) in zip(self._plans, programs.heads, strict=True):
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
        programs.model.run(
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
        programs, hidden_ND = self._needed, hidden_TD[last_N]
        num_rows = len(hidden_ND)
        memory = SPARE.empty(4 * num_rows * programs.vocab_size)
        logits_NV = memory.view(np.float32).reshape(num_rows, programs.vocab_size)
        unused = np.zeros(num_rows, np.int64)
        outside = [logits_NV.ctypes.data, hidden_ND.ctypes.data]
        at = unused.ctypes.data
        programs.head.run(num_rows, at, at, outside, [], NOTHING_RETAINED, num_threads())
        return logits_NV

    def drop_programs(self) -> None:
        """Drop the programs and the weights that they hold; no plan may run after that."""
        self._programs = None

    @property
    def _needed(self) -> PlainPrograms:
        assert self._programs is not None, "the whole runner has taken over"
        return self._programs


def saved_programs(start: Start, blocks: WarmBlocks) -> PlainPrograms:
    """Return the programs of a saved start, over these blocks."""
    data = [each.ctypes.data for each in start.data]

    def add_layers(program: CoreProgram) -> None:
        for position in start.layers:
            program.add_layer(position.given, blocks.layer(position))

    def assembled(parts: ProgramParts) -> CoreProgram:
        return parts.assemble(start.variant, add_layers, lambda at: data[at[0]] + at[1])

    return PlainPrograms(
        assembled(start.model),
        assembled(start.head),
        start.hidden_size,
        start.head.widths[0],
        start.heads,
        start,
        start.data,
    )
