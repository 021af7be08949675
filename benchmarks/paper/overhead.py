"""The host's time in each step of an engine of 2023, from measurements that no figure shows.

The papers give no times of steps. Four public records of vLLM, the papers' engine, give them. None
of them is a figure of the papers, and no constant here was chosen to meet one.

`PULL_820`   Llama-2-13B on an A100, prompts of ShareGPT. The engine sampled one request at a time
             (issue 249). With all requests at once it served 4.77 requests per second, not 3.70.
             So sampling a token takes the difference of the two times per request, divided by the
             tokens of an answer: `request_s`.
`PULL_5046`  the tokens of a prompt and of an answer in the same benchmark.
`RFC_6854`   the GPU waited 5 to 13 ms for the host in each step, after a year of improvements. Its
             lower end is the least that the engine of the papers can have waited.
`PULL_17`    8 rows of OPT-13B on a machine with the papers' memory (1,975 blocks of 8). It was
             March 2023, before inputs reached the worker by a faster way. The rest of a step,
             beyond the formula, is the most that the engine of the papers can have waited.

The fixed time of a step is the middle of the least and the most. `assumptions.py` shows the figures
at both ends.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.tools.step_times import Roofline, StepLoad

SOURCES = {
    "sampling, one request at a time": "github.com/vllm-project/vllm/pull/820 and issues/249",
    "tokens of a request": "github.com/vllm-project/vllm/pull/5046",
    "waits of the GPU, 2024": "github.com/vllm-project/vllm/issues/6854",
    "a batch of 8, March 2023": "github.com/vllm-project/vllm/pull/17",
}
REQUESTS_PER_S = (3.70, 4.77)  # PULL_820: sampling each alone, and all together
OFFLINE_TOKENS, OFFLINE_REQUESTS = 6895.75, 14.33  # PULL_5046, per second, prompts and answers
ONLINE_TOKENS, ONLINE_REQUESTS = 3024.07, 12.29  # the same, of prompts alone
MIN_STEP_S = 5e-3  # RFC_6854
BATCH, PROMPT, OUTPUT, LATENCY_S = 8, 32, 128, 5.184  # PULL_17


@dataclass(frozen=True)
class Overhead:
    """The host's seconds in a step: of the step, and of each request that samples."""

    step_s: float
    request_s: float


@dataclass(frozen=True)
class EngineTimes(Roofline):
    """A roofline with the host's work for each sampled row, which nothing hides."""

    row_s: float = 0.0

    def seconds_of(self, load_in: Callable[[int | None], StepLoad]) -> float:
        return super().seconds_of(load_in) + self.row_s * load_in(None).num_sampled


def request_s() -> float:
    """Return the seconds to sample one token of one request."""
    alone, together = REQUESTS_PER_S
    answer = OFFLINE_TOKENS / OFFLINE_REQUESTS - ONLINE_TOKENS / ONLINE_REQUESTS
    return (1 / alone - 1 / together) / answer


def max_step_s(opt_13b: Roofline) -> float:
    """Return what remains of a step of `PULL_17` beyond the formula and sampling."""
    tokens = BATCH * PROMPT
    prompt = StepLoad(tokens, tokens, tokens * (PROMPT + 1) // 2, BATCH)
    context = BATCH * (PROMPT + OUTPUT // 2)
    middle = StepLoad(BATCH, context, context, BATCH)
    formula = opt_13b.seconds_of(lambda window: prompt)
    formula += (OUTPUT - 1) * opt_13b.seconds_of(lambda window: middle)
    return (LATENCY_S - formula) / OUTPUT - BATCH * request_s()


def overhead(opt_13b: Roofline) -> Overhead:
    """Return the middle of the least and the most. opt_13b: the formula, on the papers' device."""
    return Overhead((MIN_STEP_S + max_step_s(opt_13b)) / 2, request_s())
