"""Recordings on disk: a directory of segments, each of which can be replayed by itself.

A segment is a file of frames (`engine/recording/frames.py`): a header, a snapshot, and calls. The
header of a segment that goes on where another ends holds the sum of that one, so a segment that is
missing between two shows. The newest segments are kept, so many that all together stay within a
bound.

Recordings are read by `read_recording`, which tells whole segments from those that are cut off and
those that are damaged.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.base.errors import ConfigError
from quire.engine.recording.calls import GOES_ON, end_of
from quire.engine.recording.frames import FORMAT, MAGIC, FrameEncoder, State, read_frames

NAME = re.compile(r"segment-(\d{6})\.rec")
OTHER_FORMAT = re.compile(rb"quire recording( \d{1,9})?\n")
NUM_SEGMENTS = 8  # of which a full recording consists


class RecordingFiles:
    """The segments of a directory, as they are written. Raises OSError.

    max_bytes: of all segments together; those of earlier runs count, and go first.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of the segment that is open
        self.last_crc: int | None = None  # of the segment before the open one
        self._file = -1
        self._frames = FrameEncoder()
        self._path = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [NAME.fullmatch(path.name) for path in directory.iterdir()]
        self._number = max((int(name[1]) for name in found if name), default=0)

    @property
    def is_full(self) -> bool:
        """Whether the open segment has reached its share."""
        return self.num_bytes >= self.max_bytes // NUM_SEGMENTS

    def begin(self) -> None:
        """End the open segment and begin the next one."""
        self.end()
        self._number += 1
        self._path = self.directory / f"segment-{self._number:06}.rec"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self.num_bytes = 0
        self._frames = FrameEncoder()
        self._write(MAGIC)

    def append(self, body: bytes) -> None:
        """Write msgpack as one frame."""
        self._write(self._frames.frame(body))
        if self.num_bytes > self.max_bytes // (2 * NUM_SEGMENTS):  # not for a snapshot alone
            self._remove_old()

    def end(self) -> None:
        """Write that nothing more comes in the open segment, and close it."""
        if self._file >= 0:
            self._write(self._frames.end())
            self.last_crc = self._frames.crc
        self.close()

    def close(self) -> None:
        """Leave the open segment as it is: cut off."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            done = os.write(self._file, view)
            self.num_bytes += done
            view = view[done:]

    def _remove_old(self) -> None:
        """Delete the oldest segments, but never the open one, until the rest is within the
        bound."""
        paths = segment_paths(self.directory)
        total = sum(path.stat().st_size for path in paths)
        for path in paths:
            if total <= self.max_bytes or path == self._path:
                return
            total -= path.stat().st_size
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


@dataclass(frozen=True)
class Segment:
    """header: format, version, settings, whether tokens were kept; `new`: what the scheduler was
    made of, if the segment begins with its start; `previous`: the sum of the segment that it goes
    on from. snapshot: `scheduler.snapshot`'s data. items: of `engine/recording/calls.py`, up to
    where it is cut off or damaged. problem: what is wrong with it, in words. crc: its sum. follows:
    it goes on where the segment that was read before it ends."""

    path: Path
    header: dict[str, Any]
    snapshot: Any
    items: list[Any]
    state: State = State.WHOLE
    problem: str = ""
    crc: int = 0
    follows: bool = False

    @property
    def is_readable(self) -> bool:
        """Whether header and snapshot are there."""
        return bool(self.header)

    @property
    def is_cut(self) -> bool:
        return self.state is State.CUT


def segment_paths(directory: Path) -> list[Path]:
    """List the segments of a directory, oldest first."""
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))


def read_recording(path: Path) -> Iterator[Segment]:
    """Yield the segments of a directory, or the one in a file, oldest first; also those that are
    cut off or damaged, which say so. Raises ConfigError if there is none."""
    try:
        if not path.is_dir():
            yield read_segment(path)
            return
        before: Segment | None = None
        for each in segment_paths(path):
            with contextlib.suppress(FileNotFoundError):  # the engine removes old ones meanwhile
                segment = read_segment(each)
                if before is not None:
                    segment = _linked(before, segment)
                    yield _followed(before, segment)
                before = segment
        if before is None:
            cores = sorted(each.name for each in path.glob("core-*"))
            which = f"one of its {', '.join(cores)}" if cores else "the directory given to --record"
            raise ConfigError(f"there is no recording in {path}; give {which}.")
        yield _followed(before, None)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"the recording {path} cannot be read: {reason}.") from error


def read_segment(path: Path) -> Segment:
    """Read one segment. Raises ConfigError if the file is no recording, or of another format;
    OSError."""
    data = path.read_bytes()
    frames = read_frames(data)
    if frames is None:
        if found := OTHER_FORMAT.match(data):
            raise _other_format(path, int(found[1] or 1))
        raise ConfigError(f"{path} is not a quire recording.")
    if len(frames.bodies) < 2:
        state, problem = frames.state, frames.problem or "it has no snapshot"
        return Segment(path, {}, None, [], max(state, State.CUT), problem)
    try:
        header, snapshot, *batches = map(msgspec.msgpack.decode, frames.bodies)
        number = header["format"]
        items = [item for batch in batches for item in batch]
    except (msgspec.MsgspecError, TypeError, KeyError, RecursionError) as error:
        return Segment(path, {}, None, [], State.DAMAGED, f"it cannot be decoded: {error}")
    if number != FORMAT:
        raise _other_format(path, number)
    return Segment(path, header, snapshot, items, frames.state, frames.problem, frames.crc)


def _linked(before: Segment, segment: Segment) -> Segment:
    """Check a segment against the one before it."""
    if not segment.is_readable or not segment.header["follows"]:
        return segment
    if before.state is not State.WHOLE:
        return segment  # there is a gap, which was told of the other one
    if segment.header["previous"] == before.crc:
        return dataclasses.replace(segment, follows=True)
    problem = f"it does not continue where {before.path.name} ends: one between them is missing"
    if segment.state is State.DAMAGED:
        problem = f"{problem}; {segment.problem}"
    return dataclasses.replace(segment, state=State.DAMAGED, problem=problem)


def _followed(segment: Segment, after: Segment | None) -> Segment:
    """Check a segment against the one behind it."""
    goes_on = segment.state is State.WHOLE and end_of(segment.items) == GOES_ON
    if not goes_on or (after is not None and (not after.is_readable or after.header["follows"])):
        return segment
    return dataclasses.replace(
        segment, state=State.CUT, problem="the segment that continues it is missing"
    )


def _other_format(path: Path, number: object) -> ConfigError:
    return ConfigError(
        f"{path} has the format {number!r}; this version reads {FORMAT}. Use the version of quire"
        " that made it."
    )
