"""Experts that the tokens of a step used, as an attachment of the forward pass.

Each row reports the experts of all tokens that it computes. A token that a prefix hit supplies is
computed by no row, so the engine uses no prefix hits then (derive.py).

Shape legend: T tokens of the step, D model dim, L mixtures of the model, C experts of a token.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from quire.base.plan import Plan, StepResult, TokenValues
from quire.models.parts.routes import chosen_experts
from quire.runner.attachment import ForwardPart
from quire.spec.model_options import ExpertOptions


class RoutingModel(Protocol):
    """A model that copies its routers' logits."""

    def router_logits(self, num_tokens: int) -> torch.Tensor: ...


class HasModel(Protocol):
    """A runner, whose model an update of the weights replaces."""

    model: RoutingModel


class RoutedExperts:
    """Attachment that reports the experts of each computed token."""

    def __init__(self, runner: HasModel, options: ExpertOptions) -> None:
        self._runner, self._options = runner, options
        self.at_rest = ForwardPart()

    def prepare(self, plan: Plan) -> "RoutesPart | None":
        """See Attachment."""
        assert not plan.drafts, "speculative decoding is refused with routed experts"
        return RoutesPart(plan, self._runner, self._options) if len(plan.rows) else None


@dataclass(frozen=True)
class RoutesPart(ForwardPart):
    """The experts of one step's tokens."""

    plan: Plan
    runner: HasModel
    options: ExpertOptions
    num_tensors: int = 1

    def after(self, hidden_TD: torch.Tensor) -> list[torch.Tensor]:
        """Return the chosen experts, int16 [T, L, C]."""
        return [chosen_experts(self.runner.model.router_logits(len(hidden_TD)), self.options)]

    def read(self, result: StepResult, arrived: list[torch.Tensor]) -> StepResult:
        """Add the experts by row."""
        experts_TLC, plan = arrived[0].numpy(), self.plan
        parts = np.split(experts_TLC, np.cumsum(plan.num_tokens)[:-1])
        firsts = plan.computed_bound.tolist()
        found = {
            row: TokenValues(first, part.shape[1:], part.flatten())
            for row, first, part in zip(plan.rows.tolist(), firsts, parts, strict=True)
        }
        return result.replace(token_values=found)
