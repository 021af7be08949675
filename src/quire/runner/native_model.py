"""A model whose forward pass is one call into the C++ core (csrc/program.h).

Shape legend: T tokens of the step, R rows, D model dim, V vocabulary, N query heads, H head dim.
"""

import logging
from typing import Any

import torch

from quire.models.model import Model
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.traced import TracedAttention
from quire.ops.native import address, needed_core
from quire.ops.native_types import CorePlan, CoreProgram, CoreStatePlan
from quire.ops.packed import PackedWeight
from quire.ops.program import Kind, ProgramDraft, Tracer, Untraceable
from quire.ops.registry import record_ops
from quire.ops.threads import num_threads
from quire.ops.torch_threads import torch_threads

logger = logging.getLogger(__name__)

TRACED_TOKENS = 3  # any number that no other dimension is likely to have


class NativeModel:
    """Has what the runner needs of a model; raises Untraceable for one that the core cannot run."""

    def __init__(self, model: Any, backend: CpuBackend) -> None:
        self._model, self._backend = model, backend
        draft, self._size = trace(model)
        self._draft, self._program = draft, assemble(draft, backend)
        self._heads = query_heads(draft, backend)

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        """Compute hidden states [T, D], float32, of the step that the backend has prepared."""
        assert attention is self._backend
        ids_T = input_ids_T.long()
        out_TD = torch.empty(len(ids_T), self._size)
        groups: list[tuple[CorePlan | CoreStatePlan, int]] = [
            (self._backend.states.plan(group), 0)
            if heads is None
            else (self._backend.plan(group, heads), self._slots(group))
            for group, heads in enumerate(self._heads)
        ]
        self._program.run(
            len(ids_T),
            address(ids_T, torch.int64),
            address(positions_T, torch.int64),
            address(out_TD, torch.float32),
            groups,
            num_threads(),
        )
        return out_TD

    def _slots(self, group: int) -> int:
        return address(self._backend.slots(group), torch.int64)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, V], float32."""
        logits_RV: torch.Tensor = self._model.logits(hidden_RD)
        return logits_RV


@torch.inference_mode()
def trace(model: Any) -> tuple[ProgramDraft, int]:
    """Trace the model: its program, and the size of the hidden states that it returns."""
    ids_T = torch.zeros(TRACED_TOKENS, dtype=torch.int64)
    positions_T = torch.arange(TRACED_TOKENS)
    with record_ops(keeps_values=True) as record:
        hidden_TD = model(ids_T, positions_T, TracedAttention())
    draft = Tracer(record, ids_T, positions_T).trace(hidden_TD)
    return draft, hidden_TD.shape[1]


def query_heads(draft: ProgramDraft, backend: CpuBackend) -> list[int | None]:
    """Count the query heads of a KV head for each cache group, None for a group of states; they
    must be equally many in all layers."""
    found: dict[int, int | None] = {}
    for instruction in draft.instructions:
        if instruction.kind in (Kind.CONVOLVE, Kind.DELTA_RULE):
            found[backend.states.layer(instruction.layer).group] = None
        if instruction.kind == Kind.ATTEND:
            kv = backend.layer_kv(instruction.layer)
            heads = instruction.heads // kv.kv.heads
            if found.setdefault(kv.group, heads) != heads:
                raise Untraceable("layers of a cache group differ in their number of heads")
    return [found[group] for group in sorted(found)]


def assemble(draft: ProgramDraft, backend: CpuBackend) -> CoreProgram:
    """Make the core's program. The draft must outlive it: it holds the memory that it points to."""
    places, width = draft.places()
    program = needed_core().Program(draft.widths, places, width, backend.variant)
    for layer in backend.layers:
        if layer in backend.states:
            program.add_state_layer(*backend.states.layer(layer))
        else:
            kv = backend.layer_kv(layer)
            program.add_layer(kv.group, kv.kv)
    for experts in draft.experts:
        experts.add_to(program)
    phases = draft.phases
    for i, instruction in enumerate(draft.instructions):
        instruction.add_to(program, begins_phase=i == 0 or phases[i] != phases[i - 1])
    return program


class OperationsBesideCore:
    """A model that runs operation by operation, all large products of which are the core's: torch
    computes the rest with one thread."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, attention: AttentionBackend
    ) -> torch.Tensor:
        with torch_threads(1):
            hidden_TD: torch.Tensor = self._model(input_ids_T, positions_T, attention)
        return hidden_TD

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden_RD)


def native_or_same(model: Any, backend: AttentionBackend) -> Any:
    """Return the model in its native form where there is one, else itself, or with what keeps
    torch's threads out of the core's way."""
    if not isinstance(backend, CpuBackend):
        return model
    try:
        return NativeModel(model, backend)
    except Untraceable as reason:
        logger.warning("The model runs operation by operation: %s.", reason)
        is_ours = isinstance(model, Model) and model.only_operations
        return OperationsBesideCore(model) if is_ours and _is_packed(model) else model


def _is_packed(model: Model) -> bool:
    weights = (vars(layer).get("weight") for layer in model.modules())
    return any(isinstance(weight, PackedWeight) for weight in weights)
