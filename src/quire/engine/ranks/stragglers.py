"""Detection of stragglers: find the rank that prevents a step from ending.

    submitted ------------------------------ all ranks have answered, or one misses the deadline
    Beat  Beat  Beat ...  of each rank: step it began, exchanges so far, position in the code

Ranks that share a layer wait for each other, and each stage waits for the stage before. So among
the ranks without an answer, the rank with the least progress is the straggler.

A missed deadline alone is no evidence. While the straggler's heartbeats show a new step or more
exchanges, it is slow but not hung, and its limit restarts. Time in which it waited for a CPU
(`engine/observability/starvation.py`) is subtracted.
"""

from collections.abc import Collection
from dataclasses import dataclass

from quire.engine.observability.heartbeat import StepLimit
from quire.engine.ranks.messages import Beat

# Share of a core's limit: the core names its rank before serve/supervisor.py finds the core stuck.
SHARE = 0.8
CONFIRM_S = 0.6  # time for which all looks must find a step late


@dataclass
class _LastBeat:
    """A rank's last heartbeat."""

    beat: Beat
    at_s: float  # time of arrival
    moved_s: float  # time of the last heartbeat with progress
    starved_s: float  # the rank's starved time then, or when the current work began


class StragglerWatch:
    """Progress of ranks on the current work, a step or a drafting order. num_in_stage: ranks that
    share each layer. limit: time limit of a step."""

    def __init__(self, num_ranks: int, num_in_stage: int, limit: StepLimit, now_s: float) -> None:
        self._last_beats = [_LastBeat(Beat(-1, 0, ""), now_s, now_s, 0.0) for _ in range(num_ranks)]
        self._num_in_stage, self._limit = num_in_stage, limit
        self._since_s = now_s
        self._late_since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Start the time limit of the current work now."""
        self._since_s, self._late_since_s = now_s, None
        for last_beat in self._last_beats:
            last_beat.starved_s = last_beat.beat.starved_s

    def end(self, now_s: float) -> None:
        """Measure the work that ended, and start the time limit of the next work."""
        self._limit.observe(now_s - self._since_s)
        self.begin(now_s)

    def hear(self, rank: int, beat: Beat, now_s: float) -> bool:
        """Record a heartbeat. Return whether it shows progress or starvation of the rank."""
        last = self._last_beats[rank]
        has_moved = _progress(beat) != _progress(last.beat)
        moved_s, starved_s = last.moved_s, last.starved_s
        if has_moved:
            moved_s, starved_s = now_s, beat.starved_s
        self._last_beats[rank] = _LastBeat(beat, now_s, moved_s, starved_s)
        return has_moved or beat.starved_s > last.beat.starved_s

    def is_late(self, now_s: float, absent: Collection[int]) -> bool:
        """Return whether this look and all looks of the last CONFIRM_S found the work overdue. So a
        pause of the whole machine makes no rank a straggler. absent: ranks without an answer."""
        if self.idle_s(now_s, self._since_s, absent) <= SHARE * self._limit.seconds:
            self._late_since_s = None
            return False
        if self._late_since_s is None:
            self._late_since_s = now_s
        return now_s - self._late_since_s >= CONFIRM_S

    def idle_s(self, now_s: float, since_s: float, absent: Collection[int]) -> float:
        """Return the seconds since `since_s` in which the straggler made no progress, without the
        time in which it was starved."""
        last_beat = self._last_beats[self.straggler(absent)]
        starved_s = last_beat.beat.starved_s - last_beat.starved_s
        return now_s - max(since_s, last_beat.moved_s) - starved_s

    def straggler(self, absent: Collection[int]) -> int:
        """Return the straggler: the rank with the least progress among the ranks in `absent`."""

        def progress(rank: int) -> tuple[int, int, int, float]:
            last_beat = self._last_beats[rank]
            stage, beat = rank // self._num_in_stage, last_beat.beat
            return stage, beat.number, beat.num_exchanges, last_beat.at_s

        return min(absent, key=progress)

    def describe(self, rank: int, work: str, now_s: float) -> str:
        """Describe a straggler's state, as text that follows its name. work: the overdue work."""
        last_beat = self._last_beats[rank]
        beat, silent_s = last_beat.beat, now_s - last_beat.at_s
        begun = f"was in step {beat.number}" if beat.number >= 0 else "had not begun a step"
        return (
            f"is stuck: {work} did not finish within {now_s - self._since_s:.1f} s. Its last"
            f" heartbeat was {silent_s:.1f} s ago: it {begun}, after {beat.num_exchanges}"
            f" exchanges with other ranks{', ' if beat.where else ''}{beat.where}"
        )


def _progress(beat: Beat) -> tuple[int, int]:
    return beat.number, beat.num_exchanges
