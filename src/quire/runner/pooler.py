"""Pooling of hidden states, in place of logits and sampling.

A step computes parts of some prompts. Pooling by the last token uses its hidden state alone. For
the mean or the first token, each row stores its result so far, in float64, and adds token by token.
So the result does not depend on where a prompt is cut.

    sums[row]   0 when a row begins, + each token's hidden state   | mean: / tokens of the prompt
                the first token's hidden state                     | cls

All numbers of the step are read on the device, so that a graph can hold the launches. The sums have
one more row, which takes what belongs to no row: padding, and row slots that begin no prompt.

Shape legend: T token slots of the step, S row slots, N sampling row slots, R rows, D model dim, K
numbers of a pooled prompt.
"""

from collections.abc import Sequence

import torch

from quire.base.plan import StepResult
from quire.base.requests.pooling import CLS, LAST, PoolingSpec
from quire.models.parts.pooling_layers import PoolingLayer
from quire.runner.attachment import SamplingPart
from quire.runner.device import Tensors
from quire.runner.step_ops import Gathered, Needs, StepShape
from quire.runner.steps import PlainStep


class Pooler:
    """Head of a model that pools: pooling of rows, and the layers after it. A row that ends gets
    the token 0 as a placeholder."""

    samples = False

    def __init__(
        self,
        spec: PoolingSpec,
        layers: Sequence[PoolingLayer],
        num_rows: int,
        width: int,
        device: torch.device,
    ) -> None:
        self._kind, self._layers, self._num_rows = spec.kind, layers, num_rows
        num_sums = num_rows + 1 if spec.needs_all else 0
        self._sums_RD = torch.zeros(num_sums, width, dtype=torch.float64, device=device)

    def compute(
        self, gathered: Gathered, shape: StepShape, hidden_TD: torch.Tensor, needs: Needs
    ) -> torch.Tensor:
        """Add a step's hidden states, [T, D]. Return the pooled prompts of the rows that end with
        it, float64 [N, K]."""
        samples = gathered.samples
        if self._kind == LAST:
            x_ND = hidden_TD.index_select(0, samples.last).double()
        else:
            self._accumulate(gathered, hidden_TD)
            x_ND = self._sums_RD.index_select(0, samples.rows)
            if self._kind != CLS:
                x_ND = x_ND / samples.lengths.double()[:, None]
        for layer in self._layers:
            x_ND = layer(x_ND)
        return x_ND

    def choose(
        self,
        gathered: Gathered,
        computed_NK: torch.Tensor | None,
        needs: Needs,
        parts: Sequence[SamplingPart],
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """See Head; the pooled prompts go to the host."""
        assert computed_NK is not None, "they are computed first"
        is_valid_N = computed_NK.isfinite().all(1)
        return torch.zeros_like(is_valid_N, dtype=torch.int64), is_valid_N, [computed_NK]

    def _accumulate(self, gathered: Gathered, hidden_TD: torch.Tensor) -> None:
        """Add a step's part to the rows' sums."""
        inputs = gathered.inputs
        starts_S, counts_S = inputs.query_starts_S1[:-1], inputs.query_starts_S1.diff()
        no_row = self._num_rows
        rows_S = gathered.valid_rows(no_row)
        beginning_S = rows_S.where(inputs.context_lens_S == counts_S, no_row)
        if self._kind == CLS:
            first_SD = hidden_TD.index_select(0, starts_S.clamp(max=len(hidden_TD) - 1))
            self._sums_RD.index_copy_(0, beginning_S, first_SD.double())
            return
        self._sums_RD.index_fill_(0, beginning_S, 0.0)
        rows_T = torch.nn.functional.pad(rows_S, (0, 1), value=no_row)[inputs.row_slots()]
        self._sums_RD.index_add_(0, rows_T, hidden_TD[: len(rows_T)].double())


class PoolingStep(PlainStep):
    """Step of a model that pools."""

    def _read(self, result: StepResult, arrived: list[torch.Tensor]) -> StepResult:
        rows, pooled = self._plan.sample_rows, arrived[0].numpy() if arrived else ()
        by_row = {int(row): each.copy() for row, each in zip(rows, pooled, strict=False)}
        return result.replace(pooled=by_row)
