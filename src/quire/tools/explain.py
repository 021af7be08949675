"""Time lines of the requests of a recording: it is replayed, and its events are listened to."""

from collections.abc import Iterable

from quire.base.errors import ConfigError
from quire.engine.frames import State
from quire.engine.recording import Segment
from quire.engine.timeline import Timelines
from quire.scheduler.decisions import SchedulerView
from quire.tools.replay import Outcome, Step, replay_all, restored

MOST_REQUESTS = 1_000_000  # of a recording


def timelines_of(segments: Iterable[Segment]) -> tuple[Timelines, Outcome]:
    """Return the time lines, and what a reader must know of the recording. Raises ConfigError for a
    whole one in which nothing happened."""
    lines: list[Timelines] = []
    last: list[Segment] = []

    def show(segment: Segment, step: Step, _: SchedulerView) -> None:
        if not last or last[-1] is not segment:
            if not last or not segment.follows:
                scheduler = restored(segment)
                begun = Timelines.of(scheduler.view(), scheduler.requests(), MOST_REQUESTS)
                if lines:  # after a gap: what ended before it is still known
                    begun.ended = lines[-1].ended
                lines.append(begun)
            last.append(segment)
            del last[:-1]
        for event in step.events:
            lines[-1](event)

    outcome = replay_all(segments, show)
    if not lines and outcome.state is State.WHOLE and outcome.difference is None:
        raise ConfigError("nothing happened in this recording.")
    outcome.note_difference()
    return lines[-1] if lines else Timelines(0, 1), outcome
