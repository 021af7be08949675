"""Recordings on disk: a directory of segments, each of which can be replayed by itself.

A segment is a file of frames (`engine/recording/frames.py`): a header, a snapshot, and calls. The
header of a continuing segment holds the checksum of the previous segment, so a missing segment is
detected. The newest segments are retained, up to a maximum size of all segments together.

`read_recording` reads a recording and reports whether each segment is whole, cut off or damaged.
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
from quire.engine.recording.calls import CONTINUES, end_of
from quire.engine.recording.frames import FORMAT, MAGIC, FrameEncoder, State, read_frames

NAME = re.compile(r"segment-(\d{6})\.rec")
OTHER_FORMAT = re.compile(rb"quire recording( \d{1,9})?\n")
NUM_SEGMENTS = 8  # segments of a full recording


class RecordingFiles:
    """Writer of the segments of a directory. All methods may raise OSError.

    max_bytes: maximum size of all segments together. Segments of earlier runs count, and are
    deleted first.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.num_bytes = 0  # size of the open segment
        self.last_crc: int | None = None  # checksum of the segment before the open one
        self._file = -1
        self._frames = FrameEncoder()
        self._path = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [NAME.fullmatch(path.name) for path in directory.iterdir()]
        self._number = max((int(name[1]) for name in found if name), default=0)

    @property
    def is_full(self) -> bool:
        """Whether the open segment has reached its share of max_bytes."""
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
        """Write a msgpack body as one frame, and delete the oldest segments if necessary."""
        self._write(self._frames.frame(body))
        if self.num_bytes > self.max_bytes // (2 * NUM_SEGMENTS):  # more than a snapshot
            self._remove_old()

    def end(self) -> None:
        """Write the end frame of the open segment, and close it."""
        if self._file >= 0:
            self._write(self._frames.end())
            self.last_crc = self._frames.crc
        self.close()

    def close(self) -> None:
        """Close the open segment without an end frame, so that it is cut off."""
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
        """Delete the oldest segments, but never the open one, until all are within max_bytes."""
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
    """Segment. header: format, version, settings, whether tokens are recorded. Its `new` has the
    scheduler's parameters, if the segment begins with the scheduler's start. Its `previous` is the
    checksum of the segment that this one continues. snapshot: data of `scheduler.snapshot`. items:
    items of `engine/recording/calls.py`, up to a cut or damage. problem: description of the damage.
    crc: checksum. follows: whether it continues the segment read before it."""

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
        """Whether the segment has a header and a snapshot."""
        return bool(self.header)

    @property
    def is_cut(self) -> bool:
        return self.state is State.CUT


def segment_paths(directory: Path) -> list[Path]:
    """Return the paths of a directory's segments, oldest first."""
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))


def read_recording(path: Path) -> Iterator[Segment]:
    """Yield the segments of a directory, oldest first, or the segment of a file. Segments that are
    cut off or damaged are included; see `Segment.state`. Raises ConfigError without segments."""
    try:
        if not path.is_dir():
            yield read_segment(path)
            return
        before: Segment | None = None
        for each in segment_paths(path):
            with contextlib.suppress(FileNotFoundError):  # a running engine deletes old segments
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
    """Read one segment. Raises ConfigError for a file of another kind or format, and OSError."""
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
    """Return a segment after checking whether it continues the segment before it."""
    if not segment.is_readable or not segment.header["follows"]:
        return segment
    if before.state is not State.WHOLE:
        return segment  # the other segment reports the gap
    if segment.header["previous"] == before.crc:
        return dataclasses.replace(segment, follows=True)
    problem = f"it does not continue where {before.path.name} ends: one between them is missing"
    if segment.state is State.DAMAGED:
        problem = f"{problem}; {segment.problem}"
    return dataclasses.replace(segment, state=State.DAMAGED, problem=problem)


def _followed(segment: Segment, after: Segment | None) -> Segment:
    """Return a segment after checking that its announced continuation, if any, exists."""
    is_continued = segment.state is State.WHOLE and end_of(segment.items) == CONTINUES
    if not is_continued or (
        after is not None and (not after.is_readable or after.header["follows"])
    ):
        return segment
    return dataclasses.replace(
        segment, state=State.CUT, problem="the segment that continues it is missing"
    )


def _other_format(path: Path, number: object) -> ConfigError:
    return ConfigError(
        f"{path} has the format {number!r}; this version reads {FORMAT}. Use the version of quire"
        " that made it."
    )
