"""Run the blocks of a vision tower in one call of the C++ core (csrc/program.h), on a CPU.

The blocks are traced once, as text models are. For each image the core gets its embedded patches,
their rotation factors, and memory for the states that the rest of the tower reads. Each range of
patches is a row of a step. The blocks run in sequence and reuse one memory for keys and values.
Memory is allocated for each image and then freed. Between its weights the core rounds nothing.

Shape legend: T patches, D tower width, H head dim.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from quire.models.vision.attention import BlockAttention
from quire.ops.attention.base import KVLayout
from quire.ops.attention.cpu import why_not
from quire.ops.attention.traced import TracedAttention
from quire.ops.attention.within_step import CoreWithinStep
from quire.ops.attention_inputs import AttentionStep
from quire.ops.elementwise import add_into
from quire.ops.host.native import address
from quire.ops.host.native_types import CoreProgram
from quire.ops.host.threads import num_threads
from quire.ops.registry import record_ops
from quire.ops.trace.program import Kind, ProgramDraft, Untraceable, here
from quire.ops.trace.program_parts import ProgramParts
from quire.ops.trace.tracer import Tracer
from quire.spec.cache_group import STEP, CacheGroup

logger = logging.getLogger(__name__)

# Runs the blocks on patches, with their attention and rotation factors; returns states, [T, D].
Blocks = Callable[[torch.Tensor, BlockAttention, torch.Tensor | None], list[torch.Tensor]]

BLOCK_SIZE = 16  # patches
TRACED_PATCHES = 3  # an arbitrary number that other dimensions are unlikely to have
CPU = torch.device("cpu")


@dataclass(frozen=True)
class BlockProgram:
    """A traced tower. draft: owner of the memory that `parts` points to. heads, head_dim: heads of
    the attention in all blocks."""

    draft: ProgramDraft
    parts: ProgramParts
    dtype: torch.dtype
    heads: int
    head_dim: int

    @classmethod
    @torch.inference_mode()
    def traced(
        cls, blocks: Blocks, num_cuts: int, x_TD: torch.Tensor, rotary_rows: torch.Tensor | None
    ) -> Self:
        """Trace the blocks with x [T, D] and rotary_rows of any image. Raises Untraceable."""
        entering = [x_TD.new_zeros(TRACED_PATCHES, *x_TD.shape[1:])]
        if rotary_rows is not None:
            entering.append(rotary_rows.new_zeros(TRACED_PATCHES, *rotary_rows.shape[1:]))
        with record_ops(keeps_values=True) as record:
            states = blocks(entering[0], TracedAttention(), (*entering, None)[1])
            found = [torch.empty_like(state) for state in states]
            for out_TD, state_TD in zip(found, states, strict=True):
                add_into(out_TD, state_TD, None)
        # Blocks read neither ids nor positions, so tracing rejects operations that do.
        ids_T, positions_T = (torch.zeros(TRACED_PATCHES, dtype=torch.int64) for _ in range(2))
        draft = Tracer(record, ids_T, positions_T).trace(found[0], [*found[1:], *entering])
        attends = [each for each in draft.instructions if each.kind == Kind.ATTEND]
        sizes = {(each.heads, draft.widths[each.views[0].buffer] // each.heads) for each in attends}
        if len(sizes) != 1:
            raise Untraceable(f"its blocks must have heads of one size, got {sorted(sizes)}")
        parts = draft.parts({cut: cut for cut in range(num_cuts)}, here)
        return cls(draft, parts, x_TD.dtype, *sizes.pop())

    def run(
        self,
        x_TD: torch.Tensor,
        cuts: Sequence[Sequence[int]],
        rotary_rows: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return the states of an image, [T, D] each; see VisionTower.run_blocks."""
        return [state.to(self.dtype) for state in self._exact_states(x_TD, cuts, rotary_rows)]

    def num_bytes(self, num_cuts: int) -> int:
        """Count the bytes that a run needs for each patch, including its input."""
        floats = self.parts.arena + sum(self.draft.widths[: self.draft.num_outside])
        width = self.heads * self.head_dim
        return 4 * floats + (1 + 2 * num_cuts) * width * self.dtype.itemsize

    def _exact_states(
        self,
        x_TD: torch.Tensor,
        cuts: Sequence[Sequence[int]],
        rotary_rows: torch.Tensor | None,
    ) -> list[torch.Tensor]:
        """Return the states in float32, [T, D] each. All other memory is freed."""
        entering = [x_TD.float().contiguous()]
        if rotary_rows is not None:
            entering.append(rotary_rows.contiguous())
        num_states = self.draft.num_outside - len(entering)
        states = [torch.empty(len(x_TD), width) for width in self.draft.widths[:num_states]]
        backends = [self._attention(bounds) for bounds in cuts]

        def add_layers(program: CoreProgram) -> None:
            for cut, backend in enumerate(backends):
                program.add_layer(cut, backend.layer_kv(0).kv)

        program = self.parts.assemble(backends[0].variant, add_layers, int)
        program.run(
            len(x_TD),
            0,  # ids and positions: none
            0,
            [address(rows, torch.float32) for rows in (*states, *entering)],
            [(each.plan(0, 1), address(each.slots(0), torch.int64)) for each in backends],
            (0, 0, 0, 0),
            num_threads(),
        )
        return states

    def _attention(self, bounds: Sequence[int]) -> CoreWithinStep:
        """Return attention within ranges. bounds: cumulative lengths of the ranges, from 0."""
        starts = np.array(bounds, np.int32)
        lengths = np.diff(starts)
        num_blocks = int((-(-lengths // BLOCK_SIZE)).sum())
        backend = CoreWithinStep(layout(self.dtype, self.heads, self.head_dim, num_blocks))
        backend.prepare(
            AttentionStep(
                positions_T=torch.empty(0),  # bidirectional attention reads no positions
                query_starts_S1=torch.from_numpy(starts),
                context_lens_S=torch.from_numpy(lengths),
                slots_T=(),
                block_tables_SL=(),
                query_lens_host=lengths,
                context_lens_host=lengths,
            )
        )
        return backend


def layout(dtype: torch.dtype, heads: int, head_dim: int, num_blocks: int) -> KVLayout:
    """Return the memory layout of the keys and values of one cut."""
    group = CacheGroup(STEP, (0,), heads, head_dim)
    return KVLayout((group,), (num_blocks,), BLOCK_SIZE, dtype, CPU)


def trace_blocks(
    blocks: Blocks, num_cuts: int, x_TD: torch.Tensor, rotary_rows: torch.Tensor | None
) -> BlockProgram | None:
    """Trace the blocks with x [T, D] if the core can run them; otherwise return None. Log a warning
    if an operation cannot be traced."""
    if x_TD.device != CPU or why_not(layout(x_TD.dtype, 1, 1, 0)) is not None:
        return None
    try:
        return BlockProgram.traced(blocks, num_cuts, x_TD, rotary_rows)
    except Untraceable as reason:
        logger.warning("The vision tower runs operation by operation: %s.", reason)
        return None
