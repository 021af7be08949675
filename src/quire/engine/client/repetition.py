"""Finds out that a text has begun to repeat itself, token by token."""

import numpy as np

from quire.base.repetition import RepetitionDetectionParams


class RepetitionWatch:
    """Watches one sequence of tokens for `RepetitionDetectionParams`.

    For each length L of a pattern it counts for how many tokens in a row each was the one L places
    before it. The end of the text is a pattern of L tokens, c times, where that is (c - 1) * L.
    """

    __slots__ = ("_needed", "_recent", "_runs")

    def __init__(self, params: RepetitionDetectionParams) -> None:
        sizes = np.arange(1, params.max_pattern_size + 1, dtype=np.int64)
        self._needed = sizes * (params.min_count - 1)
        self._needed[: params.least_size - 1] = np.iinfo(np.int64).max
        self._recent = np.full(params.max_pattern_size, -1, np.int64)  # the last token comes first
        self._runs = np.zeros(params.max_pattern_size, np.int64)

    def push(self, token_id: int) -> bool:
        """Take the next token; tell whether the text ends with a repeated pattern."""
        self._runs = np.where(self._recent == token_id, self._runs + 1, 0)
        self._recent[1:] = self._recent[:-1]
        self._recent[0] = token_id
        return bool((self._runs >= self._needed).any())
