"""A model whose forward pass is one call into the C++ core (csrc/program.h).

Shape legend: T tokens of the step, R rows, D model dim, V vocabulary, N query heads, H head dim.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.models.model import Model
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.kept_inputs import DeltaInputs, KeptInputs
from quire.ops.attention.traced import TracedAttention
from quire.ops.native import address
from quire.ops.native_types import CorePlan, CoreProgram, CoreStatePlan
from quire.ops.packed import PackedWeight
from quire.ops.program import Instruction, Kind, ProgramDraft, Untraceable, here
from quire.ops.registry import record_ops
from quire.ops.threads import num_threads
from quire.ops.torch_threads import torch_threads
from quire.ops.tracer import Tracer

logger = logging.getLogger(__name__)

Kept = tuple[int, int, int, int]  # address and width of memory, address and number of tokens
NOTHING_KEPT: Kept = (0, 0, 0, 0)
TRACED_TOKENS = 3  # any number that no other dimension is likely to have


class NativePass:
    """A traced forward pass over one backend's layers; raises Untraceable where the core cannot."""

    def __init__(self, draft: ProgramDraft, backend: CpuBackend) -> None:
        self.draft, self._backend = draft, backend  # the draft holds what the program points to
        self.heads = query_heads(draft, backend)
        self._axes = position_axes(draft)
        self._program = assemble(draft, backend, list(self.heads))

    def run(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        outside: Sequence[torch.Tensor],
        kept: Kept = NOTHING_KEPT,
    ) -> None:
        """Compute the step that the backend has prepared. positions: [T], or [axes, T] where they
        have several. outside: the draft's first buffers, float32 [T, width]. kept: where to keep
        what layers with states are given."""
        ids_T, positions_T = ids_T.long(), positions_T.expand(self._axes, -1).contiguous()
        groups: list[tuple[CorePlan | CoreStatePlan, int]] = [
            (self._backend.states.plan(group), 0)
            if heads is None
            else (self._backend.plan(group, heads), self._slots(group))
            for group, heads in self.heads.items()
        ]
        self._program.run(
            len(ids_T),
            address(ids_T, torch.int64),
            address(positions_T, torch.int64),
            [address(rows, torch.float32) for rows in outside],
            groups,
            kept,
            num_threads(),
        )

    @property
    def expert_pairs(self) -> int:
        """Count how often tokens were sent to experts that are here."""
        return self._program.expert_pairs

    def time_phases(self) -> None:
        """Begin to measure how long each phase takes; forget what was measured."""
        self._program.time_phases(True)

    def phase_times(self) -> list[tuple[list[Instruction], float]]:
        """Return each phase's instructions, and its seconds since `time_phases`."""
        seconds, found = self._program.phase_seconds, list[tuple[list[Instruction], float]]()
        for phase, instruction in zip(self.draft.phases, self.draft.instructions, strict=True):
            if phase == len(found):
                found.append(([], seconds[phase]))
            found[phase][0].append(instruction)
        return found

    def _slots(self, group: int) -> int:
        return address(self._backend.slots(group), torch.int64)


class NativeModel:
    """Has what the runner needs of a model; raises Untraceable for one that the core cannot run.
    model: as it was loaded; compiled: its forward pass."""

    def __init__(self, model: Any, backend: CpuBackend) -> None:
        self.model, self.backend = model, backend
        draft, self._size = trace(model)
        self.compiled = NativePass(draft, backend)
        self._read_widths = draft.widths[1 : draft.num_outside - _takes_rows(model)]
        self._read: list[torch.Tensor] = []
        self._kept = KeptByProgram(draft)

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        *,
        intermediate_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute hidden states [T, D] of the step that the backend has prepared, or what the next
        stage is given, of what the one before gave [T, E]; all float32."""
        kept = attention if isinstance(attention, KeptInputs) else None
        assert (attention if kept is None else kept.inner) is self.backend
        num_tokens = len(input_ids_T)
        out_TD = torch.empty(num_tokens, self._size)
        self._read = [torch.empty(num_tokens, width) for width in self._read_widths]
        outside = [out_TD, *self._read]
        if intermediate_TE is not None:
            outside.append(intermediate_TE.float())
        if kept is None:
            self.compiled.run(input_ids_T, positions_T, outside)
        else:
            self.compiled.run(input_ids_T, positions_T, outside, self._kept.memory_for(kept))
            self._kept.tell(kept)
        return out_TD

    def last_read(self, num_tokens: int) -> torch.Tensor:
        """See Model; float32."""
        return self._read[0][:num_tokens]

    @property
    def expert_pairs(self) -> int:
        """Count how often tokens were sent to experts that are here, in all mixtures so far."""
        return self.compiled.expert_pairs

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, V], float32."""
        logits_RV: torch.Tensor = self.model.logits(hidden_RD)
        return logits_RV


def expert_pairs_of(model: Any) -> int:
    """Count how often tokens were sent to a model's experts; 0 where that is not counted, because
    it runs operation by operation. From any thread."""
    return model.expert_pairs if isinstance(model, NativeModel) else 0


class KeptByProgram:
    """What a program keeps of the rows that guess (KeptInputs in csrc/program.h): [G, width], all
    layers' inputs of a token side by side. The memory serves one step after the other."""

    def __init__(self, draft: ProgramDraft) -> None:
        kinds = Kind.CONVOLVE, Kind.DELTA_RULE
        self._instructions = [each for each in draft.instructions if each.kind in kinds]
        self._widths = [
            each.size if each.kind == Kind.CONVOLVE else 2 * each.delta.values
            for each in self._instructions
        ]
        self._memory = torch.empty(0, sum(self._widths))

    def memory_for(self, kept: KeptInputs) -> Kept:
        """Make room for a step's tokens; returns what the program takes of it."""
        count, width = len(kept.places_G), sum(self._widths)
        if width == 0:
            return NOTHING_KEPT
        if count > len(self._memory):
            self._memory = torch.empty(count, width)
        places, values = address(kept.places_G, torch.int64), address(self._memory, torch.float32)
        return values, width, places, count

    def tell(self, kept: KeptInputs) -> None:
        """Tell what was kept of each layer."""
        parts = self._memory[: len(kept.places_G)].split(self._widths, dim=1)
        for part_GC, each in zip(parts, self._instructions, strict=True):
            assert each.weight is not None
            if each.kind == Kind.CONVOLVE:
                kept.keep_convolution(each.layer, part_GC, each.weight.T)
            else:
                assert each.bias is not None
                kept.keep_rule(each.layer, DeltaInputs(part_GC, each.weight, each.bias, each.delta))


def trace(model: Any) -> tuple[ProgramDraft, int]:
    """Trace the model: its program, and the size of the hidden states that it returns."""

    def run(ids_T: torch.Tensor, positions_T: torch.Tensor) -> list[torch.Tensor]:
        is_read = isinstance(model, Model) and model.reads is not None
        entering, given = list[torch.Tensor](), {}
        if _takes_rows(model):
            entering = [torch.zeros(TRACED_TOKENS, model.entering, dtype=model.dtype)]
            given = {"intermediate_TE": entering[0]}
        hidden_TD = model(ids_T, positions_T, TracedAttention(), **given)
        return [hidden_TD, *([model.last_read(TRACED_TOKENS)] if is_read else []), *entering]

    draft = traced(run)
    return draft, draft.widths[0]


def _takes_rows(model: Any) -> bool:
    """Tell whether a model is a stage that goes on with what another has computed."""
    return isinstance(model, Model) and model.entering > 0


@torch.inference_mode()
def traced(run: Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]) -> ProgramDraft:
    """Trace what computes its result of ids and positions. It returns that first, then all memory
    of the caller's that it has read or written."""
    ids_T = torch.zeros(TRACED_TOKENS, dtype=torch.int64)
    positions_T = torch.arange(TRACED_TOKENS)
    with record_ops(keeps_values=True) as record:
        result_TD, *outside = run(ids_T, positions_T)
    return Tracer(record, ids_T, positions_T).trace(result_TD, outside)


def position_axes(draft: ProgramDraft) -> int:
    """Count the axes of the positions that the draft reads."""
    kind = Kind.ROTARY_FACTORS
    return max((each.count for each in draft.instructions if each.kind == kind), default=1)


def query_heads(draft: ProgramDraft, backend: CpuBackend) -> dict[int, int | None]:
    """Count the query heads of a KV head for each cache group that the draft uses, in order, None
    for a group of states; they must be equally many in all layers."""
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
    """Make the core's program. The draft must outlive it: it holds the memory that it points to.
    groups: those that it uses, as a step gives them; a layer of another group is not run."""

    def add_layers(program: CoreProgram) -> None:
        for layer in backend.layers:
            if layer in backend.states:
                group, states = backend.states.layer(layer)
                program.add_state_layer(groups.index(group) if group in groups else 0, states)
            else:
                found = backend.layer_kv(layer)
                place = groups.index(found.group) if found.group in groups else 0
                program.add_layer(place, found.kv)

    return draft.parts(layer_places(backend), here).assemble(backend.variant, add_layers, int)


def layer_places(backend: CpuBackend) -> dict[int, int]:
    """Return the places of layers among all that the backend has memory for."""
    return {layer: place for place, layer in enumerate(backend.layers)}


class OperationsBesideCore:
    """A model that runs operation by operation, all large products of which are the core's: torch
    computes the rest with one thread."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        *,
        intermediate_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        with torch_threads(1):
            given = {} if intermediate_TE is None else {"intermediate_TE": intermediate_TE}
            hidden_TD: torch.Tensor = self._model(input_ids_T, positions_T, attention, **given)
        return hidden_TD

    def last_read(self, num_tokens: int) -> torch.Tensor:
        return self._model.last_read(num_tokens)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden_RD)


def native_or_same(model: Any, backend: AttentionBackend) -> Any:
    """Return the model in its native form where there is one, else itself, or with what keeps
    torch's threads out of the core's way."""
    if backend.name != CpuBackend.name:
        return model
    try:
        if not isinstance(backend, CpuBackend):
            raise Untraceable("ranks attend together (decode_context_parallel_size)")
        return NativeModel(model, backend)
    except Untraceable as reason:
        logger.warning("The model runs operation by operation: %s.", reason)
        is_ours = isinstance(model, Model) and model.only_operations
        return OperationsBesideCore(model) if is_ours and _is_packed(model) else model


def _is_packed(model: Model) -> bool:
    weights = (vars(layer).get("weight") for layer in model.modules())
    return any(isinstance(weight, PackedWeight) for weight in weights)
