"""Rebuild the timelines of a recording's requests from the events of its replay."""

from collections.abc import Iterable

from quire.base.errors import ConfigError
from quire.engine.observability.timeline import Timelines
from quire.engine.recording.files import Segment
from quire.engine.recording.frames import State
from quire.scheduler.core.names import Digester
from quire.scheduler.scheduler import Scheduler
from quire.tools.replay import Outcome, Step, replay_all, restored

MAX_REQUESTS = 1_000_000  # limit of a recording's requests


class Listener:
    """Builds timelines during a replay (`replay_all`'s show). None before the first call."""

    def __init__(self) -> None:
        self.timelines: Timelines | None = None
        self._last: Segment | None = None

    def __call__(self, segment: Segment, step: Step, _: Scheduler) -> None:
        if self._last is not segment:
            if self.timelines is None or not segment.follows:
                scheduler = restored(segment, Digester())
                begun = Timelines.of(scheduler.view(), scheduler.requests(), MAX_REQUESTS)
                if self.timelines is not None:  # after a gap: keep requests that ended before it
                    begun.ended = self.timelines.ended
                self.timelines = begun
            self._last = segment
        assert self.timelines is not None
        for event in step.events:
            self.timelines(event)


def timelines_of(segments: Iterable[Segment]) -> tuple[Timelines, Outcome]:
    """Return the timelines, and the outcome of the replay.

    Raises ConfigError if a whole recording contains no call."""
    listener = Listener()
    outcome = replay_all(segments, listener)
    whole = outcome.state is State.WHOLE and outcome.difference is None
    if listener.timelines is None and whole:
        raise ConfigError("nothing happened in this recording.")
    outcome.note_difference()
    return listener.timelines or Timelines(0, 1), outcome
