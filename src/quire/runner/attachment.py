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
from quire.runner.device import Tensors
from quire.runner.step_ops import Asked, Int32, Needs, Sampling, StepShape

if TYPE_CHECKING:  # a start without torch imports this file
    import torch

    from quire.ops.attention_inputs import AttentionStep
    from quire.ops.rows.step_inputs import SampleInputs
    from quire.ops.sampling.logit_edits import EditTable


class Step(Protocol):
    """A plan on its way. Whatever `begin` raises, the rows' counters have not moved, and the plan
    can be carried out again. What `end` raises, the device has met with; it cannot go on."""

    def begin(self) -> None:
        """Put the plan's work after all earlier work."""
        ...

    def is_done(self) -> bool:
        """Return whether `end` returns at once."""
        ...

    def end(self) -> StepResult:
        """Wait for the work; return what it gave."""
        ...


class Work(Protocol):
    """The work of a step in two halves."""

    @property
    def num_places(self) -> int:
        """Return how many places for rows it has; 0: one for each row."""
        ...

    def first(self, shape: StepShape) -> Tensors:
        """Compute up to the logits; return what the host reads before the other half."""
        ...

    def second(self) -> Tensors:
        """Choose tokens and, last of all, move the counters; return what crosses to the host."""
        ...


class ForwardPart:
    """What a feature does in the forward pass of one step; by default nothing. A device may carry
    the step out much later, so a part never changes.

    num_tensors: how many `after` returns. can_be_recorded: whether a recorded step does the same.
    """

    num_tensors: int = 0

    @property
    def can_be_recorded(self) -> bool:
        return self.num_tensors == 0

    def before(self) -> None:
        """Do the feature's own work before the forward pass."""

    def inputs(
        self, ids_T: "torch.Tensor", positions_T: "torch.Tensor"
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the model's ids and positions."""
        return ids_T, positions_T

    def attention(self, step: "AttentionStep") -> "AttentionStep":
        """Return the step as attention is to see it."""
        return step

    def after(self, hidden_TD: "torch.Tensor") -> "list[torch.Tensor]":
        """Return what crosses to the host, made of the hidden states of all known tokens."""
        return []

    def read(self, result: StepResult, arrived: "list[torch.Tensor]") -> StepResult:
        """Add what crossed to the step's result."""
        return result


class Attachment(Protocol):
    """A feature that follows a runner's plans."""

    @property
    def at_rest(self) -> ForwardPart:
        """Return its part in recorded steps."""
        ...

    def prepare(self, plan: Plan) -> ForwardPart | None:
        """Note which rows a plan starts, forks and releases; return the part in its step. A second
        time it changes nothing."""
        ...


class SamplingPart:
    """What a feature does in the sampling of one step; by default nothing. Parts nest: the first
    gets the raw logits and the final tokens.

    hosted: places of rows that the host looks at between the halves of a step. processed: places of
    rows whose logits the request's own functions change. errors: by row.
    """

    hosted: Sequence[int] = ()
    processed: Sequence[int] = ()
    errors: Mapping[int, str] = {}

    def seen(self, logits_NV: "torch.Tensor", longest: int) -> "list[torch.Tensor]":
        """Return what the host looks at. longest: tokens of a row."""
        return []

    def take(self, seen: "list[torch.Tensor]", sampling: Sampling) -> None:
        """Find out on the host what changes."""

    def before(self, logits_NV: "torch.Tensor") -> "torch.Tensor":
        """Return the logits, which may be changed."""
        return logits_NV

    def edited(self, logits_NV: "torch.Tensor") -> None:
        """Change edited logits in place, before the choice."""

    def chosen(
        self, logits_NV: "torch.Tensor", ids_N: "torch.Tensor", samples: "SampleInputs"
    ) -> "torch.Tensor":
        """Return the tokens, which may be chosen again from the edited logits."""
        return ids_N

    def found(self) -> "list[torch.Tensor]":
        """Return what crosses to the host."""
        return []

    def read(
        self, result: StepResult, arrived: "list[torch.Tensor]", *, is_recorded: bool
    ) -> StepResult:
        """Add what crossed to the step's result. is_recorded: it is of all rows."""
        return result


class SamplingFeature:
    """What some rows request beyond the columns of their state; by default nothing. It hears of
    these rows alone (`asks_for_features`), of each once until the row is released."""

    def start(self, start: RowStart) -> None:
        """Note what a row requests that a sequence takes."""

    def copy(self, parent: int, child: int) -> None:
        """Let a forked child request what its parent does."""

    def release(self, row: int) -> None:
        """Forget a row."""

    def part_of(self, needs: Needs, asked: Asked | None) -> SamplingPart | None:
        """Return the part in a step, for all rows if it is recorded (None); None: there is none."""
        return None


class EditLists(Protocol):
    """Lists and biases of rows (`edits.py`). generation: how often the table got other memory."""

    generation: int
    table: "EditTable"

    def spans(self, rows: Int32, places: npt.NDArray[np.intp]) -> dict[int, Int32]:
        """Return where the lists of the rows at these places stand, by place."""
        ...
