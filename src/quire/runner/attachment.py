"""Steps, and how features attach to them: the interfaces. No torch.

Each kind of plan has its kind of `Step`, whose `Work` has two halves. An `Attachment` follows the
plans, and its `ForwardPart` takes part in the forward passes that need it. A `SamplingFeature`
follows the rows, and its `SamplingPart` takes part in the sampling of the steps whose rows request
it. A plain step has no parts.

Shape legend: T tokens of the step, N sampling rows, D model dim, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from quire.base.plan import Plan, RowStart, StepResult
from quire.runner.device import Graph, Tensors
from quire.runner.step_ops import Gathered, Int32, Needs, Sampling, SamplingRequests, StepShape

if TYPE_CHECKING:  # a start without torch imports this file
    import torch

    from quire.ops.attention_inputs import AttentionStep
    from quire.ops.rows.step_inputs import SampleInputs
    from quire.ops.sampling.logit_edits import EditTable


class Step(Protocol):
    """A submitted plan. If `begin` raises, no row's counter has moved and the plan can be submitted
    again. If `end` raises, the device itself has failed and cannot continue."""

    def begin(self) -> None:
        """Queue the plan's work after all earlier work."""
        ...

    def is_done(self) -> bool:
        """Return whether `end` returns at once."""
        ...

    def end(self) -> StepResult:
        """Wait for the work and return its result."""
        ...


class Work(Protocol):
    """The work of a step in two halves.

    graph: recording of all of the work, which sends nothing but tokens to the host; None if there
    is more to launch."""

    @property
    def graph(self) -> Graph | None: ...

    @property
    def num_row_slots(self) -> int:
        """Return the number of row slots in the work; 0: one for each row."""
        ...

    def first(self, shape: StepShape) -> Tensors:
        """Compute up to the logits; return what the host reads before the other half."""
        ...

    def second(self) -> Tensors:
        """Choose tokens and, last of all, move the counters; return the tensors for the host."""
        ...


class ForwardPart:
    """Part of a feature in the forward pass of one step; the default does nothing. A part is
    immutable, because a device may execute the step much later.

    num_tensors: number of tensors that `after` returns.
    is_at_rest: whether a recorded step does all of its work, so that `before` does nothing.
    can_be_recorded: whether a recorded step gives the same result.
    is_used: whether a row of the step uses the feature; None: the part is in every step.
    """

    num_tensors: int = 0
    is_used: bool | None = None

    @property
    def is_at_rest(self) -> bool:
        return False

    @property
    def can_be_recorded(self) -> bool:
        return self.num_tensors == 0

    @property
    def unused(self) -> "ForwardPart":
        """Return the part in recorded steps without a row that uses the feature."""
        return self

    def before(self) -> None:
        """Do the feature's own work before the forward pass."""

    def inputs(
        self, ids_T: "torch.Tensor", positions_T: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the model's token ids [T] and positions, [T] or [3, T]."""
        return ids_T, positions_T

    def attention(self, step: "AttentionStep") -> "AttentionStep":
        """Return the step's description as attention reads it."""
        return step

    def after(self, hidden_TD: "torch.Tensor") -> "list[torch.Tensor]":
        """Return the tensors to copy to the host, from hidden states [T, D] of known tokens."""
        return []

    def read(self, result: StepResult, arrived: "list[torch.Tensor]") -> StepResult:
        """Add the copied tensors to the step's result."""
        return result


class Head(Protocol):
    """From the hidden states of a step to its tokens. samples: whether tokens are sampled, so that
    the needs of the step's rows count."""

    samples: bool

    def compute(
        self, gathered: Gathered, shape: StepShape, hidden_TD: "torch.Tensor", needs: Needs
    ) -> "torch.Tensor | None":
        """Return the logits of the sampling rows, or the pooled numbers, [N, K]; None if no row
        samples. hidden: [T, D]."""
        ...

    def choose(
        self,
        gathered: Gathered,
        computed_NK: "torch.Tensor | None",
        needs: Needs,
        parts: "Sequence[SamplingPart]",
    ) -> "tuple[torch.Tensor, torch.Tensor, Tensors]":
        """Return each sampling row's token [N], whether there is one [N], and the tensors for the
        host."""
        ...


class Attachment(Protocol):
    """Feature of the forward pass, which follows a runner's plans."""

    @property
    def at_rest(self) -> ForwardPart:
        """Return the feature's part in recorded steps."""
        ...

    def prepare(self, plan: Plan) -> ForwardPart | None:
        """Note which rows a plan starts, forks and releases; return the part in its step. Repeated
        calls with one plan change nothing."""
        ...


def are_unused(parts: Sequence[ForwardPart]) -> bool:
    """Return whether there are features that a step may use, and the step's rows use none."""
    uses = {part.is_used for part in parts}
    return False in uses and True not in uses


def recorded_parts(attachments: Sequence[Attachment], needs: Needs) -> list[ForwardPart]:
    """Return the features' parts in a recorded step."""
    parts = [each.at_rest for each in attachments]
    return [part.unused for part in parts] if needs.is_unused else parts


class SamplingPart:
    """Part of a feature in the sampling of one step; the default does nothing. Parts nest: the
    first part gets the raw logits and the final tokens.

    hosted: positions of rows that the host inspects between the halves of a step.
    processed: positions of rows whose logits are changed by the request's own functions.
    errors: messages by row.
    """

    hosted: Sequence[int] = ()
    processed: Sequence[int] = ()
    errors: Mapping[int, str] = {}

    def seen(self, logits_NV: "torch.Tensor", longest: int) -> "list[torch.Tensor]":
        """Return the tensors that the host inspects, from logits [N, V]. longest: of a row."""
        return []

    def take(self, seen: "list[torch.Tensor]", sampling: Sampling) -> None:
        """Compute on the host the changes that this step needs."""

    def before(self, logits_NV: "torch.Tensor") -> "torch.Tensor":
        """Return the logits [N, V], possibly changed."""
        return logits_NV

    def edited(self, logits_NV: "torch.Tensor") -> None:
        """Change the edited logits [N, V] in place, before tokens are chosen."""

    def chosen(
        self, logits_NV: "torch.Tensor", ids_N: "torch.Tensor", samples: "SampleInputs"
    ) -> "torch.Tensor":
        """Return the tokens [N], possibly chosen again from the edited logits [N, V]."""
        return ids_N

    def found(self) -> "list[torch.Tensor]":
        """Return the tensors to copy to the host."""
        return []

    def read(
        self, result: StepResult, arrived: "list[torch.Tensor]", *, is_recorded: bool
    ) -> StepResult:
        """Add the copied tensors to the step's result. is_recorded: whether they cover all rows."""
        return result


class SamplingFeature:
    """Sampling feature beyond the columns of a row's state; the default does nothing. It is
    notified only of rows that request it (`requests_features`), once each until release."""

    def start(self, start: RowStart) -> None:
        """Note the features that a starting row requests."""

    def copy(self, parent: int, child: int) -> None:
        """Copy the parent's requested features to a forked child."""

    def release(self, row: int) -> None:
        """Drop the features of a released row."""

    def part_of(self, needs: Needs, requested: SamplingRequests | None) -> SamplingPart | None:
        """Return the feature's part in a step, or None if it has no part. requested: None for a
        recorded step, whose part serves all rows."""
        return None


class EditLists(Protocol):
    """Edit lists and biases of rows (`edits.py`). generation: count of table reallocations."""

    generation: int
    table: "EditTable"

    def spans(self, rows: Int32, positions: npt.NDArray[np.intp]) -> dict[int, Int32]:
        """Return the span of each row's lists in the table, by position. rows, positions: [K]."""
        ...
