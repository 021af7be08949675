"""How many tokens a step has time for: follows how long steps take.

Who decodes gets a token per step, so a step with a prompt in it should not take longer than
`STEP_S`. What a token costs is not known before: it depends on the machine, on what else runs there
and on how long contexts are. So the last steps tell. They tell it only if they had something of a
prompt in them and were large, or took too long: a small step mostly takes the time of reading the
weights, which would not become longer with more tokens.

    time of a step = time of reading the weights + tokens x time of a token

Where reading the weights alone takes most of `STEP_S`, few tokens would make prompts slow and
answers hardly faster: a step may take twice what one with a few decoding rows takes.

The rate is the median of the last three that tell, so one step that the system disturbed changes
nothing. The budget changes only if it is off by more than a margin, so it does not jump to and fro.
"""

from collections import deque

from quire.base.plan import Plan
from quire.runner.budget import STEP_S, STRIDE, bounded_tokens

NUM_RATES, FEWEST_RATES = 3, 2
NUM_SMALL, SMALL_TOKENS = 5, 4  # steps that show what reading the weights takes
RAISE, LOWER = 1.05, 0.9  # of what a step has time for, over the next budget and under this one


class StepBudget:
    """num_tokens: the budget, as long as nothing was observed that speaks against it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._rates: deque[float] = deque(maxlen=NUM_RATES)  # tokens per second
        self._small_s: deque[float] = deque(maxlen=NUM_SMALL)

    @property
    def target_s(self) -> float:
        """How long a step with a prompt in it may take."""
        if len(self._small_s) < FEWEST_RATES:
            return STEP_S
        return max(STEP_S, 2 * _median(self._small_s))

    def observe(self, plan: Plan, duration_s: float) -> int:
        """Take the time of a step; return the tokens that the next ones have time for."""
        num_tokens = plan.num_scheduled_tokens
        if duration_s <= 0 or num_tokens == 0:
            return self.num_tokens
        if int(plan.num_tokens.max()) == 1:
            if num_tokens <= SMALL_TOKENS:
                self._small_s.append(duration_s)
        elif 2 * num_tokens >= self.num_tokens or duration_s > self.target_s:
            self._rates.append(num_tokens / duration_s)
            self._follow()
        return self.num_tokens

    def _follow(self) -> None:
        if len(self._rates) < FEWEST_RATES:
            return
        tokens = self.target_s * _median(self._rates)
        if tokens >= RAISE * (self.num_tokens + STRIDE) or tokens <= LOWER * self.num_tokens:
            self.num_tokens = bounded_tokens(tokens)


def _median(values: deque[float]) -> float:
    """The larger one of the two in the middle, if they are even in number."""
    return sorted(values)[len(values) // 2]
