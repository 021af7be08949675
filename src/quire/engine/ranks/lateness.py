"""Finds the rank that keeps a step from ending.

    handed over ---------------------------- all ranks have answered: in time, or one is late
    Beat  Beat  Beat ...  of each rank: the step it has begun, exchanges so far, place in the code

Ranks that share a layer wait for each other, and those of a stage for the stage before: of those
that did not answer, the one that has come least far keeps the others.

Time alone is no evidence. As long as that rank's beats show a new step or more exchanges, it is
slow and not hung: the limit counts from the last progress. Time in which it wanted a CPU and got
none (`engine/observability/starvation.py`) does not count.
"""

from collections.abc import Collection
from dataclasses import dataclass

from quire.engine.observability.heartbeat import StepLimit
from quire.engine.ranks.messages import Beat

# Of what a core is given: it tells of its rank before it is itself missed (serve/supervisor.py).
SHARE = 0.8
CONFIRM_S = 0.6  # between the first look that found a step late, and one that counts


@dataclass
class _Heard:
    """A rank's last sign of life."""

    beat: Beat
    at_s: float  # when it came
    moved_s: float  # when it last showed progress
    starved_s: float  # of the rank, at that time


class Lateness:
    """What is under way, as long as something is, and where ranks say they are. num_in_stage: ranks
    that share each layer. limit: how long a step may take."""

    def __init__(self, num_ranks: int, num_in_stage: int, limit: StepLimit, now_s: float) -> None:
        self._heard = [_Heard(Beat(-1, 0, ""), now_s, now_s, 0.0) for _ in range(num_ranks)]
        self._num_in_stage, self._limit = num_in_stage, limit
        self._since_s = now_s
        self._late_since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Count from now: something is handed over while nothing is under way."""
        self._since_s, self._late_since_s = now_s, None
        for heard in self._heard:
            heard.starved_s = heard.beat.starved_s

    def end(self, now_s: float) -> None:
        """Count what ended, and what is under way behind it from now."""
        self._limit.observe(now_s - self._since_s)
        self.begin(now_s)

    def hear(self, rank: int, beat: Beat, now_s: float) -> bool:
        """Take a sign of life. Return whether it shows progress, or that the rank was starved."""
        last = self._heard[rank]
        has_moved = _progress(beat) != _progress(last.beat)
        moved_s, starved_s = last.moved_s, last.starved_s
        if has_moved:
            moved_s, starved_s = now_s, beat.starved_s
        self._heard[rank] = _Heard(beat, now_s, moved_s, starved_s)
        return has_moved or beat.starved_s > last.beat.starved_s

    def is_late(self, now_s: float, absent: Collection[int]) -> bool:
        """Tell whether what is under way should be over, at this look and at those of the last
        CONFIRM_S: a machine that stood still as a whole finds nobody late. absent: the ranks that
        have not answered."""
        if self.idle_s(now_s, self._since_s, absent) <= SHARE * self._limit.seconds:
            self._late_since_s = None
            return False
        if self._late_since_s is None:
            self._late_since_s = now_s
        return now_s - self._late_since_s >= CONFIRM_S

    def idle_s(self, now_s: float, since_s: float, absent: Collection[int]) -> float:
        """Return for how long the rank that keeps the others has made no progress, since a time.
        Time in which it was starved does not count."""
        heard = self._heard[self.who(absent)]
        starved_s = heard.beat.starved_s - heard.starved_s
        return now_s - max(since_s, heard.moved_s) - starved_s

    def who(self, absent: Collection[int]) -> int:
        """Return which of those that did not answer has come least far."""

        def progress(rank: int) -> tuple[int, int, int, float]:
            heard = self._heard[rank]
            stage, beat = rank // self._num_in_stage, heard.beat
            return stage, beat.number, beat.num_exchanges, heard.at_s

        return min(absent, key=progress)

    def tell(self, rank: int, what: str, now_s: float) -> str:
        """Say what is known of it, behind its name."""
        heard = self._heard[rank]
        beat, silent_s = heard.beat, now_s - heard.at_s
        begun = f"was in step {beat.number}" if beat.number >= 0 else "had not begun a step"
        return (
            f"is stuck: {what} did not finish within {now_s - self._since_s:.1f} s. Its last"
            f" heartbeat was {silent_s:.1f} s ago: it {begun}, after {beat.num_exchanges}"
            f" exchanges with other ranks{', ' if beat.where else ''}{beat.where}"
        )


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.number, beat.num_exchanges
