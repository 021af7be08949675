"""Which rows need which work of a sampler, on the host: a step without penalties, masks or
log-probabilities does nothing per row."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.base.plan import RowStart

Rows = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]

NO_LOGPROBS = -2  # -1 asks for the whole vocabulary
ALL_LOGPROBS = -1


@dataclass
class SamplingFlags:
    """Arrays indexed by row, meaningful between `start` and `release`.

    has_edits: lists of tokens or biases. is_beam: its candidates are for a beam search. top_k: 0 is
    off. num_logprobs: candidates, NO_LOGPROBS or ALL_LOGPROBS.
    """

    is_greedy: Flags
    has_filter: Flags
    has_penalties: Flags
    has_edits: Flags
    is_beam: Flags
    top_k: Int64
    num_logprobs: Int64

    @classmethod
    def of_rows(cls, max_num_rows: int) -> "SamplingFlags":
        """Make flags of rows that ask for nothing."""
        return cls(
            is_greedy=np.ones(max_num_rows, bool),
            has_filter=np.zeros(max_num_rows, bool),
            has_penalties=np.zeros(max_num_rows, bool),
            has_edits=np.zeros(max_num_rows, bool),
            is_beam=np.zeros(max_num_rows, bool),
            top_k=np.zeros(max_num_rows, np.int64),
            num_logprobs=np.full(max_num_rows, NO_LOGPROBS, np.int64),
        )

    def start(self, start: RowStart) -> None:
        """Set the flags of a row that a sequence takes."""
        row, params = start.row, start.params
        self.is_greedy[row] = params.is_greedy
        self.has_filter[row] = params.has_filters and not params.is_greedy
        self.has_penalties[row] = params.has_penalties
        self.is_beam[row] = params.use_beam_search
        self.top_k[row] = max(params.top_k, 0)
        self.num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.has_edits[row] = asks_for_edits(start)

    def release(self, rows: Rows) -> None:
        """Clear what rows asked for that sequences have left."""
        self.has_edits[rows] = False
        self.num_logprobs[rows] = NO_LOGPROBS

    def copy(self, parent: int, child: int) -> None:
        """Let a forked child sample as its parent."""
        for array in vars(self).values():
            array[child] = array[parent]

    def at(self, rows: Rows) -> "SamplingFlags":
        """Copy some rows' entries."""
        return SamplingFlags(*(array[rows] for array in vars(self).values()))


def asks_for_edits(start: RowStart) -> bool:
    """Return whether the row's logits are masked or biased."""
    params = start.params
    has_lists = bool(params.allowed_token_ids or start.bad_words_token_ids or params.logit_bias)
    return has_lists or has_least_length(start)


def has_least_length(start: RowStart) -> bool:
    """Return whether tokens that stop the row are forbidden at its beginning."""
    return start.params.min_tokens > 0 and len(start.stop_token_ids) > 0
