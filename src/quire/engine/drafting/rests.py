"""Rests of a drafter: steps without look-ups, so that failed ones take little time.

Rows with a grammar and all others are two kinds, and each kind rests on its own. So refused drafts
of many rows never hide the tokens that grammars force in a few.

    a look-up of a kind        the steps until the next one
    found nothing              grow up to `max_steps`, which follows from the time of look-ups
    found drafts, no gain      double up to MAX_REFUSED_STEPS; then only a sample is looked at
    found nothing in a sample  as many as before
    led to drafts              one. After a sample, all rows are looked at
"""

from dataclasses import dataclass

PATIENCE = 4  # failed look-ups in a row, before a rest gets longer than a step
REST_STEPS, MAX_REST_STEPS = 4, 16  # maximum steps of a rest, if look-ups take little or much time
MAX_REFUSED_STEPS = 32  # maximum steps of a rest after drafts that would not pay off
NUM_SAMPLED = 8  # rows that are looked at after such a rest
LOOK_SHARE = 0.005  # share of the time of steps that failed look-ups may take


def rest_after(num_misses: int, max_steps: int) -> int:
    """Return in how many steps to look again, after `num_misses` failed look-ups in a row."""
    return min(max_steps, 1 << min(10, max(0, num_misses - PATIENCE)))


def steps_for(look_s: float, step_s: float) -> int:
    """Return in how many steps one failed look-up takes `LOOK_SHARE` of the time."""
    return 1 + int(look_s / (LOOK_SHARE * step_s + 1e-9))


@dataclass(slots=True)
class Rests:
    """Rests of the rows of one kind.

    max_steps: maximum steps of a rest after failed look-ups. until: step before which the rows
    rest. num_misses: look-ups in a row without drafts. num_refused: how many of them found drafts
    that would not pay off, since the last drafts for all rows. is_sampled: whether the next look-up
    is for a sample of the rows.
    """

    max_steps: int
    until: int = 0
    num_misses: int = 0
    num_refused: int = 0
    is_sampled: bool = False

    def end(self, step: int, *, is_sample: bool) -> None:
        """End the rest, since drafts pay off. is_sample: for a sample of the rows; then it is
        open whether they do so for all."""
        self.until, self.num_misses, self.is_sampled = step + 1, 0, False
        if not is_sample:
            self.num_refused = 0

    def miss(self, step: int, *, is_sample: bool) -> None:
        """Set the rest after a look-up that found nothing."""
        if not is_sample:
            self.num_refused, self.is_sampled = 0, False
        self._rest(step)

    def refuse(self, step: int) -> int:
        """Set the rest after drafts that would not pay off, or after a slow look-up. Return its
        steps."""
        self.num_refused += 1
        self.is_sampled = True
        self._rest(step)
        return self.until - step

    def _rest(self, step: int) -> None:
        self.num_misses += 1
        refused = 1 << min(10, self.num_refused) if self.num_refused else 0
        num = max(rest_after(self.num_misses, self.max_steps), min(MAX_REFUSED_STEPS, refused))
        self.until = step + num
