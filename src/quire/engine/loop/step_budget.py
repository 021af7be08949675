"""How many tokens a step has time for: follows how long steps take.

Who decodes gets a token per step, so a step with a prompt in it should not take longer than
`STEP_S`. What a token costs is not known before: it depends on the machine, on what else runs there
and on how long contexts are. So the last steps tell. They tell it only if they had something of a
prompt in them and were large, or took too long: a small step mostly takes the time of reading the
weights, which would not become longer with more tokens.

    time of a step = time of reading the weights + tokens x time of a token

The time that does not depend on the tokens is told by steps of different sizes. Where it is most of
`STEP_S` (a large model, or a machine that others keep busy), few tokens would make prompts slow and
answers hardly faster: then a step may take twice that time.

The median of what the last three tell counts, so one step that the system disturbed changes
nothing. The budget changes only if it is off by more than a margin, so it does not jump to and fro.
"""

import math
from collections import deque

from quire.base.plan import Plan
from quire.runner.step_size import FEWEST_TOKENS, STEP_S, STRIDE, bounded_tokens

NUM_STEPS, FEWEST_STEPS = 3, 2
NUM_TIMES, FEWEST_TIMES = 3, 2  # of steps of about one size
FORGOTTEN = 32  # steps after which the time of another size says nothing any more
MOST_FIXED = 0.8  # of a step's time
MOST_GROWTH = 3  # at a time
RAISE, LOWER = 1.05, 0.9  # of what a step has time for, over the next budget and under this one


class StepBudget:
    """num_tokens: the budget, as long as nothing was observed that speaks against it."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._steps: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS)  # tokens and seconds
        self._times = _StepTimes()

    @property
    def target_s(self) -> float:
        """How long a step with a prompt in it may take."""
        return max(STEP_S, 2 * (self._times.fixed_s or 0.0))

    def observe(self, plan: Plan, duration_s: float) -> int:
        """Take the time of a step; return the tokens that the next ones have time for."""
        num_tokens = plan.num_scheduled_tokens
        if duration_s <= 0 or num_tokens == 0:
            return self.num_tokens
        self._times.add(num_tokens, duration_s)
        has_prompt = int(plan.num_tokens.max()) > 1
        if has_prompt and (2 * num_tokens >= self.num_tokens or duration_s > self.target_s):
            self._steps.append((num_tokens, duration_s))
            if len(self._steps) >= FEWEST_STEPS:
                self._follow()
        return self.num_tokens

    def _follow(self) -> None:
        tokens = sorted(map(self._time_for, self._steps))[len(self._steps) // 2]
        if tokens >= RAISE * (self.num_tokens + STRIDE) or tokens <= LOWER * self.num_tokens:
            wanted = bounded_tokens(min(tokens, MOST_GROWTH * self.num_tokens))
            if wanted == self.num_tokens == FEWEST_TOKENS and self._times.fixed_s is None:
                wanted = 2 * FEWEST_TOKENS  # see whether larger steps take much longer
            self.num_tokens = wanted
            self._steps.clear()

    def _time_for(self, step: tuple[int, float]) -> float:
        """Estimate how many tokens there is time for, if so many took so long: between what it
        would be if all time came from tokens, and if the fixed part came on top. Part of it passes
        at the same time."""
        num_tokens, duration_s = step
        fixed_s = min(self._times.fixed_s or 0.0, MOST_FIXED * duration_s)
        in_all = self.target_s / duration_s
        beside = (self.target_s - fixed_s) / (duration_s - fixed_s)
        return num_tokens * math.sqrt(in_all * beside)


class _StepTimes:
    """The last times of steps, by size: from one power of two to the next."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._last: dict[int, int] = {}  # when there was a step of this size
        self._times: dict[int, deque[tuple[float, int]]] = {}

    def add(self, num_tokens: int, duration_s: float) -> None:
        size = num_tokens.bit_length()
        self._num_steps += 1
        if self._is_forgotten(size):
            self._times[size] = deque(maxlen=NUM_TIMES)
        self._times[size].append((duration_s, num_tokens))
        self._last[size] = self._num_steps

    @property
    def fixed_s(self) -> float | None:
        """What a step takes without its tokens: where the line through the times of the smallest
        and of the largest steps begins. None as long as there are no two sizes."""
        known = [
            sorted(times)[(len(times) - 1) // 2]  # a disturbed step takes longer, never shorter
            for size, times in sorted(self._times.items())
            if len(times) >= FEWEST_TIMES and not self._is_forgotten(size)
        ]
        if not known or known[-1][1] < 2 * known[0][1]:
            return None
        (short_s, few), (long_s, many) = known[0], known[-1]
        token_s = max(0.0, (long_s - short_s) / (many - few))
        return max(0.0, short_s - token_s * few)

    def _is_forgotten(self, size: int) -> bool:
        return self._num_steps - self._last.get(size, -FORGOTTEN) > FORGOTTEN
