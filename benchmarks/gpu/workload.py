"""The requests to all engines: random token ids, lengths drawn evenly, all from one seed."""

from dataclasses import dataclass

import numpy as np

NUM_REQUESTS, SHORTEST, LONGEST, SEED = 256, 100, 1024, 0


@dataclass(frozen=True)
class Request:
    """prompt: token ids. output_len: tokens; no end of sequence comes before."""

    prompt: list[int]
    output_len: int

    @property
    def lengths(self) -> tuple[int, int]:
        return len(self.prompt), self.output_len


def random_requests(
    vocab_size: int,
    num: int = NUM_REQUESTS,
    shortest: int = SHORTEST,
    longest: int = LONGEST,
    seed: int = SEED,
) -> list[Request]:
    """Return requests with prompts and outputs of `shortest` to `longest` tokens. The first
    requests do not depend on num."""
    requests = []
    for index in range(num):
        rng = np.random.default_rng((seed, index))
        prompt_len, output_len = rng.integers(shortest, longest + 1, 2).tolist()
        requests.append(Request(rng.integers(0, vocab_size, prompt_len).tolist(), output_len))
    return requests


def num_output(requests: list[Request]) -> int:
    return sum(request.output_len for request in requests)
