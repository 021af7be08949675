"""How many tokens of an answer are reasoning, its marks included."""

from bisect import bisect_left
from collections.abc import Sequence

from quire.render.detokenizer import IncrementalDetokenizer


class ReasoningCount:
    """The parser says at which character of the answer's text reasoning ends; which token that is
    tells a detokeniser of the same kind as the answer's. num_tokens: so far."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._ends: list[int] = []  # of each token's text
        self._is_over = False
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int], end: int | None) -> None:
        """Take in new tokens. end: where reasoning ends, 0 if there is none; None: it goes on."""
        if self._is_over:
            return
        if end == 0:
            self._is_over, self.num_tokens = True, 0
            return
        at = self._ends[-1] if self._ends else 0
        for token_id in token_ids:
            at += len(self._detokenizer.push(token_id))
            self._ends.append(at)
        self.num_tokens = len(self._ends)
        if end is not None:
            self._is_over = True
            self.num_tokens = min(bisect_left(self._ends, end) + 1, len(self._ends))
