"""How many draft tokens pay off, given acceptance rates and the times of steps.

A row with k draft tokens brings 1 + a + a^2 + .. + a^k tokens on average. Here a is the probability
that a draft token is accepted if those before it were. `lengths` chooses the k of each row that
gives the highest token rate. It adds the draft token with the highest probability, one by one, and
takes the best rate on that path. If that is hardly above the plain rate, no row drafts.

The time of a step of T tokens is the median of the recent steps of that size; sizes in between are
interpolated linearly. Only steps that compute no prompt count. Times of a size that has not
occurred for long are dropped. A size up to twice the largest known one is assumed to cost as much,
so that it is tried. From there on the time grows with the size, so that no trial takes long. Steps
with draft tokens have times of their own, since each takes a little more, however few its drafts.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import log
from typing import NamedTuple

import numpy as np

from quire.base.plan import Float64, Int32, Int64, Plan
from quire.base.settings.speculation import MAX_DRAFT_TOKENS

FORGOTTEN = 128  # steps until the times of an unused size are dropped
NUM_TIMES, MIN_TIMES = 9, 2  # recent times of a size, and how many of them are enough
OLD_WEIGHT, OLD_WEIGHT_OF_ALL = 0.9, 0.98  # weight of the old estimate, of a sequence and of all
FIRST_CHANCE = 0.7  # initial acceptance probability
MIN_CHANCE = 0.05  # minimum probability of another draft token
MIN_GAIN = 1.02  # minimum ratio of the token rate with draft tokens to the one without
HOPE = 0.01  # growth of the chance per step without draft tokens, so that drafting is tried again
UNLIMITED = 1 << 30  # tokens of a step
FREE_TOKENS = 32  # tokens of a step that is tried at any time
SIZES = (1, 2, 3, *(size * 2**power for power in range(12) for size in (4, 6)))  # to 12,288 tokens


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

    def is_known(self, num_tokens: int) -> bool:
        """Return whether steps of about this size were observed, often enough to trust them."""
        size = SIZES[min(bisect_left(SIZES, num_tokens), len(SIZES) - 1)]
        return len(self._lately.get(size, ())) >= MIN_TIMES

    def seconds(self, num_tokens: int) -> float | None:
        """Return the expected seconds of a step of `num_tokens` tokens; None without any times."""
        sizes = self._sizes
        if not sizes:
            return None
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes):
            return self._median(sizes[-1]) * max(1.0, num_tokens / self._free_tokens)
        above = sizes[at]
        if at == 0 or above == num_tokens:
            return self._median(above)
        below, high = self._median(sizes[at - 1]), self._median(above)
        share = (num_tokens - sizes[at - 1]) / (above - sizes[at - 1])
        return below + share * (high - below)

    def seconds_of(self, nums: Int64) -> Float64:
        """Return `seconds` of many numbers of tokens [N]; there must be times."""
        known = np.interp(nums, self._sizes, [self._median(size) for size in self._sizes])
        return known * np.maximum(1.0, nums / self._free_tokens)

    def verify_seconds(self, plain: "StepTimes", nums: Int64) -> Float64:
        """Return the expected seconds [N] of steps with draft tokens, from their own times. Sizes
        above those cost no more than by the times of `plain` steps, so that they are tried. Sizes
        below those lie between them and a plain step. nums: rising from that step's size + 1."""
        if not self._sizes:
            return plain.seconds_of(nums)
        own, first, num_plain = self.seconds_of(nums), self._sizes[0], int(nums[0]) - 1
        if num_plain < first:
            ends = plain.seconds(num_plain) or 0.0, self._median(first)
            is_small = nums < first
            own[is_small] = np.interp(nums[is_small], (num_plain, first), ends)
        is_new = nums > self._sizes[-1]
        own[is_new] = np.minimum(own[is_new], plain.seconds_of(nums[is_new]))
        return own

    @property
    def _free_tokens(self) -> int:
        """Tokens of a step that is assumed to take as long as the largest known one."""
        return max(2 * self._sizes[-1], FREE_TOKENS)

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


def max_likely(chance: float) -> int:
    """Return after how many draft tokens another one is too improbable to be worth a look."""
    if chance <= MIN_CHANCE:
        return 1
    return MAX_DRAFT_TOKENS if chance >= 1 else 1 + int(log(MIN_CHANCE) / log(chance))


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
    chances: Seq[float | Seq[float]],
    num_others: int,
    times: StepTimes,
    drafting_s: Callable[[int], float] | None = None,
    verified: StepTimes | None = None,
    max_tokens: int = UNLIMITED,
) -> list[int]:
    """Return the number of draft tokens for each row that gives the highest token rate.

    Without any times, each row gets its maximum. Without a gain of `MIN_GAIN`, none gets any.

    Args:
        max_drafts: maximum draft tokens of each row.
        chances: acceptance probability of a draft token if all before it are accepted. It is one
            number for a row, or one for each of the row's draft tokens.
        num_others: tokens of the step in addition to one for each of these rows.
        times: times of steps.
        drafting_s: seconds to draft that many tokens for all rows.
        verified: times of steps with draft tokens, if they differ from `times`.
        max_tokens: token budget of a step. Larger steps would be cut, so their times stay unknown.
    """
    num_tokens = num_others + len(max_drafts)
    plain_s = times.seconds(num_tokens)
    if plain_s is None:
        return list(max_drafts)
    rows, depths, gains = _draft_gains(max_drafts, chances)
    order = np.argsort(-gains, kind="stable")[: max(0, max_tokens - num_tokens)]
    if len(order) == 0:
        return [0] * len(max_drafts)
    gained = num_tokens + np.cumsum(gains[order])
    seconds = (verified or times).verify_seconds(times, num_tokens + 1 + np.arange(len(order)))
    if drafting_s is not None:
        longest = np.maximum.accumulate(depths[order])
        seconds += np.array([drafting_s(num) for num in range(1 + longest[-1])])[longest]
    rates = gained / np.maximum(seconds, 1e-9)
    best = int(rates.argmax())
    if rates[best] < MIN_GAIN * num_tokens / max(plain_s, 1e-9):
        return [0] * len(max_drafts)
    found: list[int] = np.bincount(rows[order[: best + 1]], minlength=len(max_drafts)).tolist()
    return found


def _draft_gains(
    max_drafts: Seq[int], chances: Seq[float | Seq[float]]
) -> tuple[Int64, Int64, Float64]:
    """Return the draft tokens that are worth a look, row by row. Of each: its row, its number
    within the row from 1 on, and the probability that it is accepted."""
    rows, depths, gains = list[int](), list[int](), list[float]()
    for row, (max_tokens, chance) in enumerate(zip(max_drafts, chances, strict=True)):
        each = [chance] * max_tokens if isinstance(chance, float | int) else chance
        gain = 1.0
        for i in range(max_tokens):
            gain *= each[i]
            if i > 0 and gain <= MIN_CHANCE:
                break
            rows.append(row)
            depths.append(i + 1)
            gains.append(gain)
    return np.array(rows, np.int64), np.array(depths, np.int64), np.array(gains)
