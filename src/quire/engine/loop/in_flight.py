"""The steps in flight, their speed, and the time to plan the next one. The loop plans late, to
include requests that arrive meanwhile, but early enough that the device never waits."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.masks import MaskPromise
from quire.base.messages import MeasuredRates
from quire.base.plan import Plan, StepResult
from quire.runner.setup.step_size import StepBudget

Sampling = npt.NDArray[np.object_]
NO_SAMPLING: Sampling = np.empty(0, object)
SHARE = 0.75  # of the time until the device runs out of plans; steps may be shorter than expected
LEAD_S = 0.002  # for planning, submitting and waking up
PREFILL_TOKENS = 32  # smaller steps do not show how fast prompts are computed
RATE_CHANGE = 0.2  # relative change of a rate that is reported


@dataclass(slots=True)
class StepInFlight:
    """Plan in flight, with what the loop knows about it."""

    plan: Plan  # as the scheduler made it
    sampling: Sampling  # the sequences of its sample_rows
    carried_out: Plan  # as submitted: without `omitted` rows, with a carried-over plan
    num_tokens: int  # of carried_out
    masks: MaskPromise | None  # of its masked rows
    omitted: frozenset[int] = frozenset()  # rows whose results are void
    result: StepResult | None = None  # once it has arrived

    @property
    def has_run(self) -> bool:
        """Whether the executor got it. A plan that has lost all its rows and moves is skipped."""
        has_work = len(self.carried_out.rows) > 0 or len(self.carried_out.moves) > 0
        return has_work or len(self.plan.rows) == 0


class InFlight(deque[StepInFlight]):
    """Steps in flight, oldest first. Only these methods may change it, since they measure the pace.

    A step is expected to take as long as the last one, or less if it has fewer tokens. If a step is
    faster than that, only the lead of one plan is lost: the loop plans at once after a result.
    num_stages: stages of the model; until as many plans are in flight, the next one is due."""

    def __init__(self, num_stages: int) -> None:
        super().__init__()
        self._num_stages = num_stages
        self._num_tokens = 1  # of the last step
        self._duration_s = 0.0
        self._began_s = 0.0  # when the device began the oldest step

    @property
    def due_s(self) -> float:
        """Time to plan the next step, while steps are in flight."""
        last_s = self._duration_s
        if len(self) < self._num_stages or SHARE * last_s * len(self) <= LEAD_S:
            return self._began_s
        per_token_s = last_s / self._num_tokens
        expected_s = sum([min(last_s, per_token_s * step.num_tokens) for step in self])
        return self._began_s + SHARE * expected_s - LEAD_S

    def begin(self, step: StepInFlight, now_s: float) -> None:
        """Add a submitted step."""
        if not self:
            self._began_s = now_s
        self.append(step)

    def end(self, now_s: float) -> None:
        """Remove the oldest step, whose result has arrived. The device begins the next."""
        self._num_tokens = max(1, self.popleft().num_tokens)
        self._duration_s, self._began_s = now_s - self._began_s, now_s

    def take_all(self) -> list[StepInFlight]:
        """Remove all steps, and return them."""
        steps = list(self)
        self.clear()
        return steps


class StepRates:
    """Rates that the scheduler knows. step_budget: None for the configured budget."""

    def __init__(self, copy_bytes_per_s: float, step_budget: StepBudget | None) -> None:
        self._step_budget = step_budget
        step_tokens = 0 if step_budget is None else step_budget.num_tokens
        self.known = MeasuredRates(copy_bytes_per_s=copy_bytes_per_s, step_tokens=step_tokens)

    def observe(self, step: StepInFlight, result: StepResult) -> MeasuredRates | None:
        """Record the time of a step; return the rates if they have changed."""
        step_tokens = self.known.step_tokens
        prefill_rate = self._prefill_rate(step.num_tokens, result.duration_s)
        if self._step_budget is not None:
            step_tokens = self._step_budget.observe(step.carried_out, result.duration_s)
        rates = MeasuredRates(prefill_rate, self.known.copy_bytes_per_s, step_tokens)
        if rates == self.known:
            return None
        self.known = rates
        return rates

    def _prefill_rate(self, num_tokens: int, duration_s: float) -> float:
        known = self.known.prefill_tokens_per_s
        min_tokens = min(PREFILL_TOKENS, self.known.step_tokens or PREFILL_TOKENS)
        if num_tokens < min_tokens or duration_s <= 0:
            return known
        rate = num_tokens / duration_s
        if abs(rate - known) <= RATE_CHANGE * known:
            return known
        return rate if known == 0 else (known + rate) / 2
