"""How many guesses are worth their time: by how often a sequence's were right, and by what steps
of more tokens have taken.

A row with k guesses, each right with probability a if those before it were, brings 1 + a + a^2 +
.. + a^k tokens on average. The k of each row that gives the most tokens per second is found by
adding the guess that is most likely right as long as that makes the step's rate no lower. What a
step of T tokens takes is the median of those of T that there were lately, and between two such
numbers it lies on the line between them. Only steps that compute no prompt are counted. What was
seen too long ago is forgotten, and a size above all that are known is taken to cost no more than
they do, so that it is tried again. Steps that try guesses have times of their own, since each of
them takes a little more, however few they are.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from quire.base.plan import Int32, Plan

FORGOTTEN = 128  # steps
NUM_TIMES = 9  # of steps of a size
KEPT, KEPT_OF_ALL = 0.9, 0.98  # of what was believed of a sequence, and of all, after a guess
FIRST_CHANCE = 0.7  # that a guess is right, where there was none
LEAST_CHANCE = 0.05
HOPE = 0.01  # how much the chance grows with each step without guesses, so that it is tried again
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class StepTimes:
    """What steps take, by how many tokens they compute."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._lately: dict[int, deque[float]] = {}  # by size
        self._seen_at: dict[int, int] = {}
        self._sizes: list[int] = []  # in order
        self._seconds: dict[int, float] = {}  # medians of what is in `_lately`, as far as asked for

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take the time of a step that computed no prompt."""
        size = SIZES[min(bisect_left(SIZES, num_tokens), len(SIZES) - 1)]
        if size not in self._lately:
            self._lately[size] = deque(maxlen=NUM_TIMES)
            insort(self._sizes, size)
        self._lately[size].append(seconds)
        self._seconds.pop(size, None)
        self._seen_at[size] = self._num_seen + 1
        self.pass_one()

    def pass_one(self) -> None:
        """Take that there was a step, of this kind or another."""
        self._num_seen += 1
        if self._seen_at and min(self._seen_at.values()) < self._num_seen - FORGOTTEN:
            self._forget()

    def seconds(self, num_tokens: int) -> float | None:
        """Return what a step of so many tokens should take; None if nothing is known."""
        sizes = self._sizes
        if not sizes:
            return None
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes):
            return self._median(sizes[-1])
        above = sizes[at]
        if at == 0 or above == num_tokens:
            return self._median(above)
        below, high = self._median(sizes[at - 1]), self._median(above)
        share = (num_tokens - sizes[at - 1]) / (above - sizes[at - 1])
        return below + share * (high - below)

    def _median(self, size: int) -> float:
        found = self._seconds.get(size)
        if found is None:
            lately = sorted(self._lately[size])
            found = self._seconds[size] = lately[len(lately) // 2]
        return found

    def _forget(self) -> None:
        for size in [s for s in self._sizes if self._seen_at[s] < self._num_seen - FORGOTTEN]:
            del self._lately[size], self._seen_at[size]
            self._sizes.remove(size)
            self._seconds.pop(size, None)


class Tried(NamedTuple):
    """Guesses at what followed a sequence's first tokens, so many."""

    num_known: int
    token_ids: Int32

    def num_right(self, known_tokens: Int32) -> int:
        """Count those that were right, up to the first wrong one, by what the sequence has got."""
        came = known_tokens[self.num_known : self.num_known + len(self.token_ids)]
        is_right = came == self.token_ids[: len(came)]
        return len(came) if is_right.all() else int(is_right.argmin())


def tries_of(plan: Plan) -> dict[int, Tried]:
    """Return what a plan tries, by row."""
    if not plan.drafts:
        return {}
    known = (plan.computed_bound + plan.num_tokens - plan.num_drafts).tolist()
    known_of = dict(zip(plan.rows.tolist(), known, strict=True))
    return {draft.row: Tried(known_of[draft.row], draft.token_ids) for draft in plan.drafts}


class Chance:
    """How often guesses were right lately. kept: of what was believed, after a guess."""

    def __init__(self, value: float = FIRST_CHANCE, kept: float = KEPT) -> None:
        self.value, self._kept = value, kept

    def observe(self, num_guessed: int, num_right: int) -> None:
        """Take what became of guesses: those up to the first wrong one were put to the test."""
        num_tested = min(num_guessed, num_right + 1)
        for i in range(num_tested):
            self.value = self._kept * self.value + (1 - self._kept) * (i < num_right)

    def hope(self, num_steps: int = 1) -> None:
        """Take steps in which nothing is guessed."""
        self.value = max(self.value, min(FIRST_CHANCE, self.value + HOPE * num_steps))


def lengths(
    most: Seq[int],
    chances: Seq[float],
    num_others: int,
    times: StepTimes,
    guessing_s: Callable[[int], float] = lambda num: 0.0,
    tried: StepTimes | None = None,
) -> list[int]:
    """Return how many guesses each row should try. most: how many it has; chances: that one of them
    is right; num_others: tokens of the step beside these rows' own; guessing_s: what it takes to
    make so many for all rows; tried: what steps take that try guesses, if that is not the same."""
    found = [0] * len(most)
    if times.seconds(1) is None:
        return list(most)
    num_tokens = num_others + len(most)
    gained = float(num_tokens)
    rate = gained / max(1e-9, times.seconds(num_tokens) or 0.0)
    if tried is None or tried.seconds(1) is None:
        tried = times
    heap = [(-chance, row) for row, chance in enumerate(chances) if most[row] > 0]
    heapify(heap)
    best, best_rate, longest = list(found), rate, 0
    while heap:
        gain, row = heappop(heap)
        found[row] += 1
        longest = max(longest, found[row])
        num_tokens += 1
        gained -= gain
        seconds = (tried.seconds(num_tokens) or 0.0) + guessing_s(longest)
        rate = gained / max(1e-9, seconds)
        if rate > best_rate:
            best, best_rate = list(found), rate
        if found[row] < most[row] and -gain * chances[row] > LEAST_CHANCE:
            heappush(heap, (gain * chances[row], row))
    return best
