"""How many draft tokens pay off, given acceptance rates and the times of steps.

A row with k draft tokens brings 1 + a + a^2 + .. + a^k tokens on average. Here a is the probability
that a draft token is accepted if those before it were. `lengths` chooses the k of each row that
gives the highest token rate. It adds the draft token with the highest probability, one by one, and
returns the best rate on that path.

The time of a step of T tokens is the median of the recent steps of that size; sizes in between are
interpolated linearly. Only steps that compute no prompt count. Times of a size that has not
occurred for long are dropped. A size above all known sizes is assumed to cost as much as the
largest of them, so that it is tried again. Steps with draft tokens have times of their own, since
each takes a little more, however few its drafts.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from quire.base.plan import Int32, Plan

FORGOTTEN = 128  # steps until the times of an unused size are dropped
NUM_TIMES = 9  # recent times of a size
OLD_WEIGHT, OLD_WEIGHT_OF_ALL = 0.9, 0.98  # weight of the old estimate, of a sequence and of all
FIRST_CHANCE = 0.7  # initial acceptance probability
MIN_CHANCE = 0.05  # minimum probability of another draft token
HOPE = 0.01  # growth of the chance per step without draft tokens, so that drafting is tried again
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class StepTimes:
    """Recent times of steps, by the number of tokens that they compute."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._lately: dict[int, deque[float]] = {}  # by size, in seconds
        self._seen_at: dict[int, int] = {}  # by size: number of the last step
        self._sizes: list[int] = []  # in ascending order
        self._seconds: dict[int, float] = {}  # medians of `_lately`, as far as computed

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the time of a step that computed no prompt."""
        size = SIZES[min(bisect_left(SIZES, num_tokens), len(SIZES) - 1)]
        if size not in self._lately:
            self._lately[size] = deque(maxlen=NUM_TIMES)
            insort(self._sizes, size)
        self._lately[size].append(seconds)
        self._seconds.pop(size, None)
        self._seen_at[size] = self._num_seen + 1
        self.pass_one()

    def pass_one(self) -> None:
        """Count a step, of this kind or another, and drop times that are too old."""
        self._num_seen += 1
        if self._seen_at and min(self._seen_at.values()) < self._num_seen - FORGOTTEN:
            self._forget()

    def seconds(self, num_tokens: int) -> float | None:
        """Return the expected seconds of a step of `num_tokens` tokens; None without any times."""
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


class PlannedDraft(NamedTuple):
    """Draft tokens that a plan verifies for one sequence."""

    num_known: int  # tokens of the sequence before them
    token_ids: Int32  # [k]

    def num_right(self, known_tokens: Int32) -> int:
        """Return how many leading draft tokens equal the sequence's `known_tokens` [T]."""
        actual = known_tokens[self.num_known : self.num_known + len(self.token_ids)]
        is_right = actual == self.token_ids[: len(actual)]
        return len(actual) if is_right.all() else int(is_right.argmin())


def planned_drafts(plan: Plan) -> dict[int, PlannedDraft]:
    """Return the draft tokens that a plan verifies, by row."""
    if not plan.drafts:
        return {}
    known = (plan.computed_bound + plan.num_tokens - plan.num_drafts).tolist()
    known_of = dict(zip(plan.rows.tolist(), known, strict=True))
    return {draft.row: PlannedDraft(known_of[draft.row], draft.token_ids) for draft in plan.drafts}


class Chance:
    """Estimate of the probability that a draft token is accepted, as a moving average.

    old_weight: weight of the old estimate when a draft token is observed."""

    def __init__(self, value: float = FIRST_CHANCE, old_weight: float = OLD_WEIGHT) -> None:
        self.value, self._old_weight = value, old_weight

    def observe(self, num_proposed: int, num_right: int) -> None:
        """Update the estimate. Draft tokens after the first rejected one do not count."""
        num_tested = min(num_proposed, num_right + 1)
        for i in range(num_tested):
            self.value = self._old_weight * self.value + (1 - self._old_weight) * (i < num_right)

    def hope(self, num_steps: int = 1) -> None:
        """Raise the estimate after steps without draft tokens, up to `FIRST_CHANCE`."""
        self.value = max(self.value, min(FIRST_CHANCE, self.value + HOPE * num_steps))


def lengths(
    max_drafts: Seq[int],
    chances: Seq[float],
    num_others: int,
    times: StepTimes,
    drafting_s: Callable[[int], float] = lambda num: 0.0,
    verified: StepTimes | None = None,
) -> list[int]:
    """Return the number of draft tokens for each row that gives the highest token rate.

    Without any times, each row gets its maximum.

    Args:
        max_drafts: maximum draft tokens of each row.
        chances: acceptance probability of a draft token of each row.
        num_others: tokens of the step in addition to one for each of these rows.
        times: times of steps.
        drafting_s: seconds to draft that many tokens for all rows.
        verified: times of steps with draft tokens, if they differ from `times`.
    """
    found = [0] * len(max_drafts)
    if times.seconds(1) is None:
        return list(max_drafts)
    num_tokens = num_others + len(max_drafts)
    gained = float(num_tokens)
    rate = gained / max(1e-9, times.seconds(num_tokens) or 0.0)
    if verified is None or verified.seconds(1) is None:
        verified = times
    heap = [(-chance, row) for row, chance in enumerate(chances) if max_drafts[row] > 0]
    heapify(heap)
    best, best_rate, longest = list(found), rate, 0
    while heap:
        gain, row = heappop(heap)
        found[row] += 1
        longest = max(longest, found[row])
        num_tokens += 1
        gained -= gain
        seconds = (verified.seconds(num_tokens) or 0.0) + drafting_s(longest)
        rate = gained / max(1e-9, seconds)
        if rate > best_rate:
            best, best_rate = list(found), rate
        if found[row] < max_drafts[row] and -gain * chances[row] > MIN_CHANCE:
            heappush(heap, (gain * chances[row], row))
    return best
