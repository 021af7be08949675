"""Recordings on disk: a directory of segments, each of which can be replayed by itself.

    segment    MAGIC, frame of the header, frame of the snapshot, frames of calls ...
    frame      length u32, CRC-32 u32 (little endian), zlib of msgpack

A frame that is cut off or damaged ends the segment: what comes before it is good. The newest
segments are kept, so many that all together stay within a bound.
"""

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.base.errors import ConfigError, EngineError

FORMAT = 1
MAGIC = b"quire recording\n"
HEAD = struct.Struct("<II")
NAME = re.compile(r"segment-(\d{6})\.rec")
NUM_SEGMENTS = 8  # of which a full recording consists
MAX_FRAME_BYTES = 1 << 30


class RecordingFiles:
    """The segments of a directory, as they are written. Raises OSError.

    max_bytes: of all segments together; those of earlier runs count, and go first.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of the segment that is open
        self._file = -1
        self._path = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = [NAME.fullmatch(path.name) for path in directory.iterdir()]
        self._number = max((int(name[1]) for name in found if name), default=0)

    @property
    def is_full(self) -> bool:
        """Whether the open segment has reached its share."""
        return self.num_bytes >= self.max_bytes // NUM_SEGMENTS

    def begin(self) -> None:
        """Close the open segment and begin the next one."""
        self.close()
        self._number += 1
        self._path = self.directory / f"segment-{self._number:06}.rec"
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self.num_bytes = 0
        self._write(MAGIC)

    def append(self, body: bytes) -> None:
        """Write msgpack as one frame."""
        packed = zlib.compress(body, 1)
        self._write(HEAD.pack(len(packed), zlib.crc32(packed)) + packed)
        if self.num_bytes > self.max_bytes // (2 * NUM_SEGMENTS):  # not for a snapshot alone
            self._remove_old()

    def close(self) -> None:
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
        """The oldest segments, but never the open one, until the rest is within the bound."""
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
    made of, if the segment begins with its start. snapshot: `scheduler.snapshot`'s data. items: of
    `engine/calls.py`. is_cut: the last frame is not whole."""

    path: Path
    header: dict[str, Any]
    snapshot: Any
    items: list[Any]
    is_cut: bool


def segment_paths(directory: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in directory.iterdir() if NAME.fullmatch(path.name))


def read_recording(path: Path) -> Iterator[Segment]:
    """The segments of a directory, or the one in a file, oldest first. Raises ConfigError."""
    try:
        paths = segment_paths(path) if path.is_dir() else [path]
        if not paths:
            raise ConfigError(f"there is no recording in {path}; give what --record was given.")
        for each in paths:
            yield read_segment(each)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"the recording {path} cannot be read: {reason}.") from error


def read_segment(path: Path) -> Segment:
    """Raises ConfigError if the file is no recording, or of another format; OSError."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise ConfigError(f"{path} is no recording of quire.")
    frames = list(_frames(data))
    bodies = [body for body in frames if body is not None]
    if len(bodies) < 2:
        raise ConfigError(f"{path} was cut off before its snapshot was whole; nothing can be told.")
    try:
        header, snapshot, *batches = map(msgspec.msgpack.decode, bodies)
        number = header["format"]
    except (msgspec.MsgspecError, TypeError, KeyError) as error:
        raise EngineError(f"{path} is damaged: {error}") from error
    if number != FORMAT:
        raise ConfigError(f"{path} has the format {number!r}; this version reads {FORMAT}.")
    items = [item for batch in batches for item in batch]
    return Segment(path, header, snapshot, items, is_cut=len(bodies) < len(frames))


def _frames(data: bytes) -> Iterator[bytes | None]:
    """The frames' contents; a None at the end if the last one is not whole."""
    at = len(MAGIC)
    while at < len(data):
        if at + HEAD.size > len(data):
            yield None
            return
        length, crc = HEAD.unpack_from(data, at)
        packed = data[at + HEAD.size : at + HEAD.size + length]
        if length > MAX_FRAME_BYTES or len(packed) < length or zlib.crc32(packed) != crc:
            yield None
            return
        try:
            yield zlib.decompress(packed)
        except zlib.error:
            yield None
            return
        at += HEAD.size + length
