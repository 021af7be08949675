"""What arrives when in steps.py: the same requests for every scheduler that it measures.

Needs only numpy, so that it also runs where quire is not installed (steps_vllm.py).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

PROMPT_LEN = 128
BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
WARM_UP = 16  # steps, one period of the blocks


@dataclass(frozen=True)
class Arrival:
    """A request: greedy, and nothing but max_tokens ends it."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Load:
    """rows: requests that run, all rows taken. num_ends: so many end in every step, and as many
    arrive before the next. num_waiting: behind those that run. spread: prompts of 113 to 128
    tokens, so that a sixteenth of the rows enters a new block in every step; otherwise all have
    128 and enter one together. num_steps: that are timed, after `warm_up` others.
    """

    rows: int
    num_steps: int
    num_ends: int = 0
    num_waiting: int = 0
    prefix_caching: bool = True
    spread: bool = True

    @property
    def lifetime(self) -> int:
        """Output tokens of a request, which are the steps that it runs."""
        if self.num_ends:
            return self.rows // self.num_ends
        return self.warm_up + self.num_steps + 1

    @property
    def warm_up(self) -> int:
        """Steps until nobody runs who came with the first."""
        return WARM_UP + (self.lifetime if self.num_ends else 0)

    @property
    def max_model_len(self) -> int:
        return PROMPT_LEN + self.warm_up + self.num_steps + BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """What the rows need and a little more, so that with ends the oldest blocks in the prefix
        cache are evicted all the time."""
        return self.rows * (-(-(PROMPT_LEN + self.lifetime) // BLOCK_SIZE) + 2)

    @property
    def token_budget(self) -> int:
        """Enough for all prompts in one step."""
        return self.rows * PROMPT_LEN

    def arrivals(self, step: int) -> list[Arrival]:
        """Requests that arrive before this step: at first all that run and wait."""
        if step:
            first = self.rows + self.num_waiting + (step - 1) * self.num_ends
            return [self._arrival(i) for i in range(first, first + self.num_ends)]
        return [self._arrival(i) for i in range(self.rows + self.num_waiting)]

    def steps(self) -> Iterator[tuple[bool, list[Arrival]]]:
        """For each step whether it is timed, and who arrives before it."""
        for step in range(self.warm_up + self.num_steps):
            yield step >= self.warm_up, self.arrivals(step)

    def _arrival(self, i: int) -> Arrival:
        """The first that run end one group after the other, as they will when all are replaced;
        those that are left over by the division stay."""
        prompt = np.random.default_rng(i).integers(0, VOCAB_SIZE, PROMPT_LEN).tolist()
        max_tokens = self.lifetime
        if i < self.rows and self.num_ends:
            group = i // self.num_ends
            max_tokens = group + 1 if group < self.lifetime else self.warm_up + self.num_steps + 1
        if i < self.rows and self.spread:
            prompt = prompt[i % BLOCK_SIZE :]
        return Arrival(str(i), prompt, max_tokens)
