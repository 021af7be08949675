"""Convert a recording to the frames that `GET /v1/engine/live` would have sent, for the web page.

    {"type": "snapshot", ...}      a whole frame: first, after a gap, and each KEY_FRAMES frames, so
                                   that a player can seek without reading from the start
    {"type": "difference", ...}    changes since the frame before
                                   both may have "first_ms" and "next_ms": mean times to first
                                   tokens and between tokens, since the frame before
    {"type": "stories", "requests": {id: lines}}     last line: a description of each request

Each is one line of JSON. The replayed production scheduler makes the same plans again, so the
frames are exact to the block. Times are on the core's clock, in seconds.
"""

import contextlib
import gzip
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

from quire.base.errors import ConfigError
from quire.base.live import LiveFrame
from quire.engine.observability.live import MAX_STEPS, LiveTally
from quire.engine.observability.metrics import EngineMetrics
from quire.engine.observability.timeline import Timeline, Timelines, in_words
from quire.engine.recording.files import Segment, read_recording
from quire.scheduler.scheduler import Scheduler
from quire.serve.native.live_events import Json, difference, head, snapshot
from quire.tools.explain import Listener
from quire.tools.replay import Outcome, Step, replay_all

KEY_FRAMES = 200
MAX_FRAMES = 200_000
MAX_STORIES = 10_000
TIMES = {"first_ms": "time_to_first_token_seconds", "next_ms": "inter_token_latency_seconds"}
SINCE = ("steps", "events", "counts")  # fields that cover the time since the event before


class Times:
    """Mean times to first tokens and between tokens, since the last call of `since`."""

    def __init__(self, num_rows: int) -> None:
        self.metrics = EngineMetrics(num_rows, 1, False)
        self._previous = dict.fromkeys(TIMES, (0.0, 0))

    def since(self) -> dict[str, float]:
        """Return the new means in milliseconds; means without new values are absent."""
        found = {}
        for name, histogram_name in TIMES.items():
            histogram = self.metrics.histograms[histogram_name]
            total, num = histogram.total, int(histogram.counts.sum())
            total_before, num_before = self._previous[name]
            self._previous[name] = total, num
            if num > num_before:
                found[name] = round(1e3 * (total - total_before) / (num - num_before), 3)
        return found


class Playback:
    """Writes frames during a replay (`replay_all`'s show).

    every_s: minimum recorded time between frames; 0 for a frame per step."""

    def __init__(self, file: IO[bytes], every_s: float) -> None:
        self.num_frames = 0
        self._file, self._every_s = file, every_s
        self._tally = LiveTally()
        self._listener = Listener()
        self._times: Times | None = None
        self._previous: LiveFrame | None = None
        self._segment: Segment | None = None
        self._last: tuple[float, Scheduler] | None = None  # last call, if it got no frame

    def __call__(self, segment: Segment, step: Step, scheduler: Scheduler) -> None:
        self._listener(segment, step, scheduler)
        if segment is not self._segment:
            self._begin(segment)
        self._times = self._times or Times(scheduler.rows.table.num_rows)
        for event in step.events:
            self._times.metrics(event)
            self._tally.take(event, scheduler.memory.block_size)
        now = step.call.now
        is_due = self._previous is None or now - self._previous.at_s >= self._every_s
        is_many = (
            self._previous is not None and self._num_new_steps(self._previous) >= MAX_STEPS // 2
        )
        if (is_due and step.plan is not None) or is_many:
            self._write_frame(now, scheduler)
            self._last = None
        else:
            self._last = now, scheduler

    def _begin(self, segment: Segment) -> None:
        """Start a new sequence of frames after a gap, or with another engine's run."""
        if not segment.follows:
            self._end_run()
            self._tally.begin()
            self._times = self._previous = None
        self._segment = segment

    def end(self) -> None:
        """Write the last frame and the stories."""
        self._end_run()
        if self._listener.timelines is not None:
            self._write({"type": "stories", "requests": _stories(self._listener.timelines)})

    def _end_run(self) -> None:
        if self._last is not None:
            self._write_frame(*self._last)
        self._last = None

    def _num_new_steps(self, frame: LiveFrame) -> int:
        last = frame.steps[-1].number if frame.steps else -1
        return self._tally.steps[-1].number - last if self._tally.steps else 0

    def _write_frame(self, now: float, scheduler: Scheduler) -> None:
        if self.num_frames >= MAX_FRAMES:
            raise ConfigError(
                f"the recording has more than {MAX_FRAMES:,} frames; use a larger --every, or one"
                " of its segments."
            )
        frame = self._tally.frame(self.num_frames + 1, now, scheduler.live_state())
        last = self._previous
        if last is None or self.num_frames % KEY_FRAMES == 0:
            event = snapshot(frame) | {"core": 0, "num_cores": 1}
            since = {} if last is None else difference(last, frame)
            event["steps"] = []
            event |= {name: since[name] for name in SINCE if name in since}
        else:
            event = {"type": "difference", **head(frame), **difference(last, frame)}
        assert self._times is not None, "a call comes before each frame"
        self._write(event | self._times.since())
        self._previous = frame
        self.num_frames += 1

    def _write(self, event: Json) -> None:
        self._file.write(msgspec.json.encode(event) + b"\n")


def _stories(timelines: Timelines) -> dict[str, list[str]]:
    lines = _lines(timelines)
    return {line.request_id: in_words(line, timelines.block_size) for line in lines}


def _lines(timelines: Timelines) -> Iterator[Timeline]:
    yield from deque(timelines.ended.values(), MAX_STORIES)
    yield from timelines.open.values()


def write_playback(recording: Path, output: Path, every_s: float, outcome: Outcome) -> int:
    """Write the file, compressed if its name ends in .gz; return the number of frames.

    outcome: filled with the replay's outcome. Raises ConfigError."""
    playback: Playback | None = None
    try:
        with _opened(output) as file:
            playback = Playback(file, every_s)
            replay_all(read_recording(recording), playback, outcome).note_difference()
            playback.end()
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}.") from error
    finally:
        if playback is not None and not playback.num_frames:
            output.unlink(missing_ok=True)
    if not playback.num_frames:
        raise ConfigError(f"nothing happened in the recording {recording}.")
    return playback.num_frames


@contextlib.contextmanager
def _opened(output: Path) -> Iterator[IO[bytes]]:
    with output.open("wb") as file:
        if output.suffix != ".gz":
            yield file
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
            yield cast("IO[bytes]", packed)
