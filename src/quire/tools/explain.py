"""Time lines of the requests of a recording: it is replayed, and its events are listened to."""

from collections.abc import Iterable

from quire.base.errors import ConfigError
from quire.engine.recording import Segment
from quire.engine.timeline import Timelines
from quire.scheduler.scheduler import Scheduler
from quire.tools.replay import Step, replay_all, restored

MOST_REQUESTS = 1_000_000  # of a recording


def timelines_of(segments: Iterable[Segment]) -> tuple[Timelines, list[str]]:
    """The time lines, and what a reader must know of the recording."""
    lines: list[Timelines] = []
    last: list[Segment] = []

    def show(segment: Segment, step: Step, scheduler: Scheduler) -> None:
        if not last or last[-1] is not segment:
            if not last or not segment.header["follows"]:
                begun = Timelines.of(restored(segment), MOST_REQUESTS)
                if lines:  # after a gap: what ended before it is still known
                    begun.ended = lines[-1].ended
                lines.append(begun)
            last.append(segment)
            del last[:-1]
        for event in step.events:
            lines[-1](event)

    outcome = replay_all(segments, show)
    if not lines:
        raise ConfigError("nothing happened in this recording.")
    notes = list(outcome.notes)
    if outcome.difference is not None:
        notes.append(
            f"this version of quire plans otherwise from step {outcome.difference.step_id} on;"
            " what follows is not told. Use the version that made the recording."
        )
    return lines[-1], notes
