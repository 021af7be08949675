"""Pooling of hidden states, in place of logits and sampling.

A step computes parts of some prompts. Pooling by the last token uses its hidden state alone. For
the mean or the first token, each row stores its result so far, in float64, and adds token by token.
So the result does not depend on where a prompt is cut.

    sums[row]   0 when a row begins, + each token's hidden state   | mean: / tokens of the prompt
                the first token's hidden state                     | cls

Shape legend: T tokens of the step, S scheduled rows, N rows that end with it, D model dim, K
numbers of a pooled prompt.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.base.requests.pooling import CLS, LAST, PoolingSpec
from quire.models.parts.pooling_layers import PoolingLayer
from quire.ops.host.host_memory import to_device
from quire.runner.step_ops import Gathered, StepShape
from quire.runner.steps import PlainStep, StepRunner


class Pooler:
    """Pooling of rows, and the layers after it."""

    def __init__(
        self,
        spec: PoolingSpec,
        layers: Sequence[PoolingLayer],
        num_rows: int,
        width: int,
        device: torch.device,
    ) -> None:
        self._kind, self._layers, self._device = spec.kind, layers, device
        num_sums = num_rows if spec.needs_all else 0
        self._sums_RD = torch.zeros(num_sums, width, dtype=torch.float64, device=device)

    def take(self, plan: Plan, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Add a step's hidden states, [T, D]. Return the pooled prompts of the rows that end with
        it, float64 [N, K]."""
        ends_S = np.cumsum(plan.num_tokens, dtype=np.int64)
        if self._kind == LAST:
            indices_N = self._index(ends_S[plan.sample_indices] - 1)
            x_ND = hidden_TD.index_select(0, indices_N).double()
        else:
            self._accumulate(plan, hidden_TD, ends_S - plan.num_tokens)
            x_ND = self._sums_RD.index_select(0, self._index(plan.sample_rows))
            if self._kind != CLS:
                lengths_S = plan.computed_bound + plan.num_tokens
                x_ND = x_ND / self._index(lengths_S[plan.sample_indices]).double()[:, None]
        for layer in self._layers:
            x_ND = layer(x_ND)
        return x_ND

    def _accumulate(self, plan: Plan, hidden_TD: torch.Tensor, begins_S: np.ndarray) -> None:
        """Add a step's part to the rows' sums."""
        begin = plan.computed_bound == 0
        fresh_rows = self._index(plan.rows[begin])
        if self._kind == CLS:
            first_ND = hidden_TD.index_select(0, self._index(begins_S[begin]))
            self._sums_RD.index_copy_(0, fresh_rows, first_ND.double())
            return
        self._sums_RD.index_fill_(0, fresh_rows, 0.0)
        rows_T = self._index(np.repeat(plan.rows, plan.num_tokens))
        self._sums_RD.index_add_(0, rows_T, hidden_TD[: len(rows_T)].double())

    def _index(self, values: np.ndarray) -> torch.Tensor:
        return to_device(values.astype(np.int64), self._device)


class PoolingStep(PlainStep):
    """Step of a model that pools. A row that ends gets the token 0 as a placeholder."""

    def __init__(
        self, runner: StepRunner, plan: Plan, masks: MaskPromise | None, pooler: Pooler
    ) -> None:
        super().__init__(runner, plan, masks)
        self._pooler = pooler
        self._pooled: list[tuple[Gathered, torch.Tensor]] = []

    def first(self, shape: StepShape) -> list[torch.Tensor]:
        """See Work."""
        runner = self._runner
        gathered = runner.rows.ops.gather(shape)
        hidden_TD = runner.hidden(gathered.inputs, shape, runner.backend, self._forward)
        self._pooled = [(gathered, self._pooler.take(self._plan, hidden_TD))]
        return []

    def second(self) -> list[torch.Tensor]:
        """Move the counters; return the pooled prompts."""
        gathered, pooled_NK = self._pooled.pop()
        is_valid_N = pooled_NK.isfinite().all(1)
        ids_N = torch.zeros_like(is_valid_N, dtype=torch.int64)
        self._runner.rows.ops.advance(gathered, ids_N, is_valid_N)
        return [pooled_NK]

    def _read(self, result: StepResult, arrived: list[torch.Tensor]) -> StepResult:
        rows, pooled = self._plan.sample_rows, arrived[0].numpy() if arrived else ()
        by_row = {int(row): each.copy() for row, each in zip(rows, pooled, strict=False)}
        return replace(result, pooled=by_row)
