"""A model whose forward pass is one call into the C++ core (csrc/program.h).

Shape legend: T tokens of the step, R rows, D model dim, V vocabulary, N query heads, H head dim.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from quire.models.model import Model
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention.cpu import CpuBackend
from quire.ops.attention.states import RecordedInputs
from quire.ops.host.native import address
from quire.ops.host.native_types import CorePlan, CoreStatePlan
from quire.ops.host.threads import num_threads, torch_threads
from quire.ops.trace.program import Instruction, ProgramDraft, Untraceable
from quire.ops.weights.packed import PackedWeight
from quire.runner.native_program import (
    NOTHING_RETAINED,
    TRACED_TOKENS,
    RetainedByProgram,
    RetainedRegion,
    assemble,
    position_axes,
    query_heads,
    takes_rows,
    trace,
    traced,
)

logger = logging.getLogger(__name__)


class NativePass:
    """Traced forward pass over a backend's layers. Raises Untraceable if the core cannot run it."""

    def __init__(self, draft: ProgramDraft, backend: CpuBackend) -> None:
        self.draft, self._backend = draft, backend  # the draft holds what the program points to
        self.heads = query_heads(draft, backend)
        self._axes = position_axes(draft)
        self.program = assemble(draft, backend, list(self.heads))

    def run(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        outside: Sequence[torch.Tensor],
        retained: RetainedRegion = NOTHING_RETAINED,
    ) -> None:
        """Compute the step that the backend has prepared. positions: [T], or [axes, T] with several
        axes. outside: the draft's first buffers, float32 [T, width]. retained: storage for the
        inputs of layers with states."""
        ids_T, positions_T = ids_T.long(), positions_T.expand(self._axes, -1).contiguous()
        groups: list[tuple[CorePlan | CoreStatePlan, int]] = [
            (self._backend.states.plan(group), 0)
            if heads is None
            else (self._backend.plan(group, heads), self._slots(group))
            for group, heads in self.heads.items()
        ]
        self.program.run(
            len(ids_T),
            address(ids_T, torch.int64),
            address(positions_T, torch.int64),
            [address(rows, torch.float32) for rows in outside],
            groups,
            retained,
            num_threads(),
        )

    @property
    def expert_pairs(self) -> int:
        """Return how many token-expert pairs were sent to experts of this rank."""
        return self.program.expert_pairs

    def time_phases(self) -> None:
        """Start to measure the duration of each phase; discard earlier measurements."""
        self.program.time_phases(True)

    def phase_times(self) -> list[tuple[list[Instruction], float]]:
        """Return each phase's instructions, and its seconds since `time_phases`."""
        seconds, found = self.program.phase_seconds, list[tuple[list[Instruction], float]]()
        for phase, instruction in zip(self.draft.phases, self.draft.instructions, strict=True):
            if phase == len(found):
                found.append(([], seconds[phase]))
            found[phase][0].append(instruction)
        return found

    def _slots(self, group: int) -> int:
        return address(self._backend.slots(group), torch.int64)


class NativeModel:
    """Model in the form that the runner needs, run by the core; raises Untraceable if the core
    cannot. model: as loaded; compiled: its forward pass."""

    def __init__(self, model: Any, backend: CpuBackend) -> None:
        self.model, self.backend = model, backend
        draft, self.hidden_size = trace(model)
        self.compiled = NativePass(draft, backend)
        self._read_widths = draft.widths[1 : draft.num_outside - takes_rows(model)]
        self._read: list[torch.Tensor] = []
        self._retained = RetainedByProgram(draft)

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attention: AttentionBackend,
        *,
        intermediate_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the hidden states [T, D] of the prepared step, or the next stage's input [T, E].
        intermediate: the previous stage's output, [T, E]. All are float32."""
        retained = attention if isinstance(attention, RecordedInputs) else None
        assert (attention if retained is None else retained.inner) is self.backend
        num_tokens = len(input_ids_T)
        out_TD = torch.empty(num_tokens, self.hidden_size)
        self._read = [torch.empty(num_tokens, width) for width in self._read_widths]
        outside = [out_TD, *self._read]
        if intermediate_TE is not None:
            outside.append(intermediate_TE.float())
        if retained is None:
            self.compiled.run(input_ids_T, positions_T, outside)
        else:
            self.compiled.run(
                input_ids_T, positions_T, outside, self._retained.memory_for(retained)
            )
            self._retained.report(retained)
        return out_TD

    @cached_property
    def head(self) -> ProgramDraft:
        """Return the traced head: logits [R, V] of hidden states [R, D]. Raises Untraceable."""

        def run(ids_R: torch.Tensor, positions_R: torch.Tensor) -> list[torch.Tensor]:
            hidden_RD = torch.zeros(TRACED_TOKENS, self.hidden_size, dtype=self.model.dtype)
            return [self.model.logits(hidden_RD), hidden_RD]

        return traced(run)

    def recorded_inputs(self, num_tokens: int) -> torch.Tensor:
        """See Model; float32."""
        return self._read[0][:num_tokens]

    def router_logits(self, num_tokens: int) -> torch.Tensor:
        """Return the routers' logits of the last pass (models/parts/routes.py), float32 [T, M]."""
        return self._read[-1][:num_tokens]

    @property
    def expert_pairs(self) -> int:
        """Return how many token-expert pairs this rank's experts got so far, in all mixtures."""
        return self.compiled.expert_pairs

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, V], float32."""
        logits_RV: torch.Tensor = self.model.logits(hidden_RD)
        return logits_RV


def expert_pairs_of(model: Any) -> int:
    """Return how many token-expert pairs were sent to a model's experts. It is 0 for a model that
    runs operation by operation, which does not count them. Any thread may call it."""
    return model.expert_pairs if isinstance(model, NativeModel) else 0


class OperationModel:
    """Model run operation by operation: the core computes large products, one torch thread the
    rest."""

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

    def recorded_inputs(self, num_tokens: int) -> torch.Tensor:
        return self._model.recorded_inputs(num_tokens)

    def router_logits(self, num_tokens: int) -> torch.Tensor:
        return self._model.router_logits(num_tokens)

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        return self._model.logits(hidden_RD)


def native_or_same(model: Any, backend: AttentionBackend) -> Any:
    """Return the native form of a model if the core can run it. Else return the model itself, or a
    wrapper that keeps torch's threads from competing with the core's."""
    if backend.name != CpuBackend.name:
        return model
    try:
        if not isinstance(backend, CpuBackend):
            raise Untraceable("ranks attend together (decode_context_parallel_size)")
        return NativeModel(model, backend)
    except Untraceable as reason:
        logger.warning("The model runs operation by operation: %s.", reason)
        is_ours = isinstance(model, Model) and model.only_operations
        return OperationModel(model) if is_ours and _is_packed(model) else model


def _is_packed(model: Model) -> bool:
    weights = (vars(layer).get("weight") for layer in model.modules())
    return any(isinstance(weight, PackedWeight) for weight in weights)
