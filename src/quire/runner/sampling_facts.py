"""Which rows need which work of a sampler, on the host: a step without penalties, masks or
log-probabilities does nothing per row."""

import numpy as np
import numpy.typing as npt

from quire.base.plan import RowStart

Rows = npt.NDArray[np.int32]

NO_LOGPROBS = -2  # -1 asks for the whole vocabulary
ALL_LOGPROBS = -1


# What a row samples with, as `sampling_numbers` gives it.
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INTEGERS = ("top_k", "seed", "sample_index", "num_prompt_tokens")


class SamplingFacts:
    """Arrays indexed by row, meaningful between `start` and `release`.

    has_edits: masks or biases. top_k: 0 is off. num_logprobs: candidates, NO_LOGPROBS or
    ALL_LOGPROBS.
    """

    def __init__(self, max_num_rows: int) -> None:
        self.is_greedy = np.ones(max_num_rows, bool)
        self.has_filter = np.zeros(max_num_rows, bool)
        self.has_penalties = np.zeros(max_num_rows, bool)
        self.has_edits = np.zeros(max_num_rows, bool)
        self.top_k = np.zeros(max_num_rows, np.int64)
        self.num_logprobs = np.full(max_num_rows, NO_LOGPROBS, np.int64)

    def start(self, start: RowStart) -> None:
        """A sequence takes a row."""
        row, params = start.row, start.params
        self.is_greedy[row] = params.is_greedy
        has_limits = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        self.has_filter[row] = has_limits and not params.is_greedy
        self.has_penalties[row] = params.has_penalties
        self.top_k[row] = max(params.top_k, 0)
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.has_edits[row] = asks_for_edits(start)

    def release(self, rows: Rows) -> None:
        """Sequences have left their rows."""
        self.has_edits[rows] = False
        self.num_logprobs[rows] = NO_LOGPROBS

    def copy(self, parent: int, child: int) -> None:
        """A fork: the child samples as its parent."""
        for array in vars(self).values():
            array[child] = array[parent]


def asks_for_edits(start: RowStart) -> bool:
    """Whether the row's logits are masked or biased."""
    params = start.params
    has_lists = bool(params.allowed_token_ids or start.bad_words_token_ids or params.logit_bias)
    return has_lists or has_least_length(start)


def has_least_length(start: RowStart) -> bool:
    """Whether tokens that stop the row are forbidden at its beginning."""
    return start.params.min_tokens > 0 and len(start.stop_token_ids) > 0


def sampling_numbers(
    start: RowStart, greedy_temperature: float
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Of FLOATS and of INTEGERS, 64 bits each. greedy_temperature: of rows that do not sample."""
    params = start.params
    floats = (
        greedy_temperature if params.is_greedy else params.temperature,
        params.top_p,
        params.min_p,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    seed = (start.seed + 2**63) % 2**64 - 2**63  # any 64 bits, as a signed number
    return floats, (max(params.top_k, 0), seed, start.sample_index, start.num_prompt_tokens)
