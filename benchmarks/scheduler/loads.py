"""Arrivals of requests in steps.py, the same for every measured scheduler.

Needs only numpy, so that it also runs without quire (steps_vllm.py).
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
    """A load of a scheduler.

    rows: running requests; they take all rows.
    num_ends: requests that end in every step; as many arrive before the next.
    num_waiting: requests in the queue.
    spread: prompts of 113 to 128 tokens, so that a sixteenth of the rows enters a new block in
    every step. Otherwise all have 128 and enter one together.
    num_steps: timed steps, after `warm_up` others.
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
        """Return the number of steps until all of the first requests have ended."""
        return WARM_UP + (self.lifetime if self.num_ends else 0)

    @property
    def max_model_len(self) -> int:
        return PROMPT_LEN + self.warm_up + self.num_steps + BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """Return the rows' need and a little more, so that with ends the prefix cache always evicts
        its oldest blocks."""
        return self.rows * (-(-(PROMPT_LEN + self.lifetime) // BLOCK_SIZE) + 2)

    @property
    def token_budget(self) -> int:
        """Enough for all prompts in one step."""
        return self.rows * PROMPT_LEN

    def arrivals(self, step: int) -> list[Arrival]:
        """Return the requests that arrive before this step; at first all that run and wait."""
        if step:
            first = self.rows + self.num_waiting + (step - 1) * self.num_ends
            return [self._arrival(i) for i in range(first, first + self.num_ends)]
        return [self._arrival(i) for i in range(self.rows + self.num_waiting)]

    def steps(self) -> Iterator[tuple[bool, list[Arrival]]]:
        """Yield for each step whether it is timed, and the requests that arrive before it."""
        for step in range(self.warm_up + self.num_steps):
            yield step >= self.warm_up, self.arrivals(step)

    def _arrival(self, i: int) -> Arrival:
        """Make a request. The first running requests end one group after the other, as later ones
        do. The remainder of the division stays."""
        prompt = np.random.default_rng(i).integers(0, VOCAB_SIZE, PROMPT_LEN).tolist()
        max_tokens = self.lifetime
        if i < self.rows and self.num_ends:
            group = i // self.num_ends
            max_tokens = group + 1 if group < self.lifetime else self.warm_up + self.num_steps + 1
        if i < self.rows and self.spread:
            prompt = prompt[i % BLOCK_SIZE :]
        return Arrival(str(i), prompt, max_tokens)
