"""Guesses from a sequence's own tokens: what followed the last time that they ended like this.

"Prompt lookup": of the last n tokens, for n from the most to the fewest that is asked for, the
newest place before where they stand already; what follows there is the guess. Where that is the
sequence's own end, it repeats itself, and so does the guess.
"""

from collections.abc import Sequence as Seq


class NGrams:
    """Where each run of n tokens of one sequence stands, for n in a range."""

    def __init__(self, fewest: int, most: int) -> None:
        self._lengths = range(most, fewest - 1, -1)
        self._end_of: dict[tuple[int, ...], int] = {}
        self.tokens: list[int] = []

    @property
    def num_taken(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Seq[int]) -> None:
        """Add tokens. The runs that end with the last one are not looked up before the next."""
        tokens, end_of = self.tokens, self._end_of
        for token_id in token_ids:
            end = len(tokens)
            for n in self._lengths:
                if n <= end:
                    end_of[tuple(tokens[end - n :])] = end
            tokens.append(token_id)

    def guess(self, num: int) -> list[int]:
        """Return `num` tokens that may come next; none if its end is new."""
        tokens = self.tokens
        end = len(tokens)
        for n in self._lengths:
            found = self._end_of.get(tuple(tokens[end - n :])) if n < end else None
            if found is not None:
                period = end - found
                return [tokens[found + i % period] for i in range(num)]
        return []
