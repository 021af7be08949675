"""Guesses from a sequence's own tokens: what followed the last time that they ended like this.

"Prompt lookup": of the last n tokens, for n from the most to the fewest that is asked for, the
newest place before where they stand already; what follows there is the guess. Where that is the
sequence's own end, it repeats itself, and so does the guess.

Of a long prompt the newest tokens are noted at first, and as many more with each guess, so that no
step waits for long.
"""

from collections.abc import Sequence as Seq

AT_ONCE = 2048


class NGrams:
    """Where each run of n tokens of one sequence stands, for n in a range."""

    def __init__(self, fewest: int, most: int) -> None:
        self._lengths = range(most, fewest - 1, -1)
        self._end_of: dict[tuple[int, ...], int] = {}
        self.tokens: list[int] = []
        self._num_left = 0  # places at the beginning that are not noted yet

    @property
    def num_taken(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Seq[int]) -> None:
        """Add tokens. The runs that end with the last one are not looked up before the next."""
        if not self.tokens and len(token_ids) > AT_ONCE:
            self.tokens, self._num_left = list(token_ids), len(token_ids)
            self._note_more()
            return
        tokens, end_of = self.tokens, self._end_of
        for token_id in token_ids:
            end = len(tokens)
            for n in self._lengths:
                if n <= end:
                    end_of[tuple(tokens[end - n :])] = end
            tokens.append(token_id)

    def _note_more(self) -> None:
        """Note the newest places of those that are left; newer ones were noted before."""
        tokens, end_of, last = self.tokens, self._end_of, self._num_left
        self._num_left = max(0, last - AT_ONCE)
        for end in range(last - 1, self._num_left - 1, -1):
            for n in self._lengths:
                if n <= end:
                    end_of.setdefault(tuple(tokens[end - n : end]), end)

    def guess(self, num: int) -> list[int]:
        """Return `num` tokens that may come next; none if its end is new."""
        if self._num_left:
            self._note_more()
        tokens = self.tokens
        end = len(tokens)
        for n in self._lengths:
            found = self._end_of.get(tuple(tokens[end - n :])) if n < end else None
            if found is not None:
                period = end - found
                return [tokens[found + i % period] for i in range(num)]
        return []
