"""Programs of the C++ core, traced from models, and inputs that they retain for drafting rows.

Shape legend: T tokens of the step, D model dim, G retained tokens, C numbers of a retained token.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.models.model import Model
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.states import DeltaInputs, RecordedInputs
from quire.ops.attention.traced import TracedAttention
from quire.ops.host.native import address
from quire.ops.host.native_types import CoreProgram
from quire.ops.registry import record_ops
from quire.ops.trace.program import Kind, ProgramDraft, Untraceable, here
from quire.ops.trace.tracer import Tracer

RetainedRegion = tuple[
    int, int, int, int
]  # address and width of memory, address and number of tokens
NOTHING_RETAINED: RetainedRegion = (0, 0, 0, 0)
TRACED_TOKENS = 3  # any number that no other dimension is likely to have


def trace(model: Any) -> tuple[ProgramDraft, int]:
    """Trace a model; return its program and the size of the hidden states that it returns."""

    def run(ids_T: torch.Tensor, positions_T: torch.Tensor) -> list[torch.Tensor]:
        records = model.records if isinstance(model, Model) else []
        entering, given = list[torch.Tensor](), {}
        if takes_rows(model):
            entering = [torch.zeros(TRACED_TOKENS, model.entering, dtype=model.dtype)]
            given = {"intermediate_TE": entering[0]}
        hidden_TD = model(ids_T, positions_T, TracedAttention(), **given)
        return [hidden_TD, *(each.last(TRACED_TOKENS) for each in records), *entering]

    draft = traced(run)
    return draft, draft.widths[0]


def takes_rows(model: Any) -> bool:
    """Return whether a model is a stage that continues from another stage's hidden states."""
    return isinstance(model, Model) and model.entering > 0


@torch.inference_mode()
def traced(run: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]) -> ProgramDraft:
    """Trace a function that computes its result from ids and positions, [T] or [axes, T]. It
    returns the result first, then each of the caller's tensors that it has read or written."""
    ids_T = torch.zeros(TRACED_TOKENS, dtype=torch.int64)
    positions_T = torch.arange(TRACED_TOKENS)
    with record_ops(keeps_values=True) as record:
        result_TD, *outside = run(ids_T, positions_T)
    return Tracer(record, ids_T, positions_T).trace(result_TD, outside)


def position_axes(draft: ProgramDraft) -> int:
    """Return the number of axes of the positions that the draft reads."""
    kind = Kind.ROTARY_FACTORS
    return max((each.count for each in draft.instructions if each.kind == kind), default=1)


def query_heads(draft: ProgramDraft, backend: CpuBackend) -> dict[int, int | None]:
    """Return the query heads of each KV head, by cache group of the draft, in order; None for
    layers with a state. Raises Untraceable if layers of a group differ."""
    found: dict[int, int | None] = {}
    for instruction in draft.instructions:
        if instruction.kind in (Kind.CONVOLVE, Kind.DELTA_RULE):
            found[backend.states.layer(instruction.layer).group] = None
        if instruction.kind == Kind.ATTEND:
            kv = backend.layer_kv(instruction.layer)
            heads = instruction.heads // kv.kv.heads
            if found.setdefault(kv.group, heads) != heads:
                raise Untraceable("layers of a cache group differ in their number of heads")
    return dict(sorted(found.items()))


def assemble(draft: ProgramDraft, backend: CpuBackend, groups: list[int]) -> CoreProgram:
    """Build the core's program. The draft must outlive it, because it holds the memory that the
    program points to. groups: cache groups of its layers, in a step's order; layers of other groups
    do not run."""

    def add_layers(program: CoreProgram) -> None:
        for layer in backend.layers:
            if layer in backend.states:
                group, states = backend.states.layer(layer)
                program.add_state_layer(groups.index(group) if group in groups else 0, states)
            else:
                found = backend.layer_kv(layer)
                group_index = groups.index(found.group) if found.group in groups else 0
                program.add_layer(group_index, found.kv)
        if draft.adapters is not None:
            assert draft.adapters.core is not None, "the core runs programs"
            program.use_adapters(draft.adapters.core)

    return draft.parts(layer_indices(backend), here).assemble(backend.variant, add_layers, int)


def layer_indices(backend: CpuBackend) -> dict[int, int]:
    """Return the index of each layer among the layers that the backend has memory for."""
    return {layer: group_index for group_index, layer in enumerate(backend.layers)}


class RetainedByProgram:
    """Inputs that a program retains for drafting rows (KeptInputs in csrc/program.h), [G, width]. A
    row holds all layers' inputs of a token. All steps reuse the memory."""

    def __init__(self, draft: ProgramDraft) -> None:
        kinds = Kind.CONVOLVE, Kind.DELTA_RULE
        self._instructions = [each for each in draft.instructions if each.kind in kinds]
        self._widths = [
            each.size if each.kind == Kind.CONVOLVE else 2 * each.delta.values
            for each in self._instructions
        ]
        self._memory = torch.empty(0, sum(self._widths))

    def memory_for(self, retained: RecordedInputs) -> RetainedRegion:
        """Allocate room for a step's tokens; return addresses and sizes for the program."""
        count, width = len(retained.indices_G), sum(self._widths)
        if width == 0:
            return NOTHING_RETAINED
        if count > len(self._memory):
            self._memory = torch.empty(count, width)
        addresses, values = (
            address(retained.indices_G, torch.int64),
            address(self._memory, torch.float32),
        )
        return values, width, addresses, count

    def report(self, retained: RecordedInputs) -> None:
        """Report each layer's retained inputs."""
        parts = self._memory[: len(retained.indices_G)].split(self._widths, dim=1)
        for part_GC, each in zip(parts, self._instructions, strict=True):
            assert each.weight is not None
            if each.kind == Kind.CONVOLVE:
                retained.record_convolution(each.layer, part_GC, each.weight.T)
            else:
                assert each.bias is not None
                retained.record_rule(
                    each.layer, DeltaInputs(part_GC, each.weight, each.bias, each.delta)
                )
