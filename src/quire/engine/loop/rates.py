"""How fast this machine computes prompts and copies blocks, as far as steps have shown."""

from quire.base.messages import MeasuredRates
from quire.base.plan import Plan, StepResult
from quire.engine.loop.step_budget import StepBudget

PREFILL_TOKENS = 32  # a step of fewer says little of how fast a prompt is computed
RATE_CHANGE = 0.2


class StepRates:
    """The rates that the scheduler knows. step_budget: follows how many tokens a step has time for;
    None: as many as are configured."""

    def __init__(self, copy_bytes_per_s: float, step_budget: StepBudget | None) -> None:
        self._step_budget = step_budget
        step_tokens = 0 if step_budget is None else step_budget.num_tokens
        self.known = MeasuredRates(copy_bytes_per_s=copy_bytes_per_s, step_tokens=step_tokens)

    def observe(self, plan: Plan, result: StepResult) -> MeasuredRates | None:
        """Take the time of a step. Return the rates if they have changed."""
        step_tokens = self.known.step_tokens
        prefill_rate = self._prefill_rate(plan, result)
        if self._step_budget is not None:
            step_tokens = self._step_budget.observe(plan, result.duration_s)
        rates = MeasuredRates(prefill_rate, self.known.copy_bytes_per_s, step_tokens)
        if rates == self.known:
            return None
        self.known = rates
        return rates

    def _prefill_rate(self, plan: Plan, result: StepResult) -> float:
        num_tokens, known = plan.num_scheduled_tokens, self.known.prefill_tokens_per_s
        least = min(PREFILL_TOKENS, self.known.step_tokens or PREFILL_TOKENS)
        if num_tokens < least or result.duration_s <= 0:
            return known
        rate = num_tokens / result.duration_s
        if abs(rate - known) <= RATE_CHANGE * known:
            return known
        return rate if known == 0 else (known + rate) / 2
