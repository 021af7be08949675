"""Frames: the file format of a recording's segment, which reveals all accidental damage.

    segment    MAGIC, frames (header, snapshot, calls ...), end frame
    frame      head, zlib of msgpack
    head       length of that u32, number of the frame u32, chained CRC-32 u32, CRC-32 of the head
               so far u32; all little endian
    end frame  a head alone: length END, the number of frames before it, the chained CRC-32

The chained CRC-32 of a frame covers the bodies of all frames up to it. So a frame that was changed,
removed, inserted, moved or duplicated does not match the frames before it. The head's own CRC-32
reveals a changed length. A file without an end frame was cut off. The checksums detect accidents
only: a deliberate change with matching checksums stays undetected.
"""

import enum
import struct
import zlib
from dataclasses import dataclass, field

from quire.base.errors import EngineError

FORMAT = 2
MAGIC = b"quire recording %d\n" % FORMAT
HEAD = struct.Struct("<III")
SUM = struct.Struct("<I")
HEAD_BYTES = HEAD.size + SUM.size
END = 0xFFFFFFFF
MAX_FRAME_BYTES = 1 << 30
MAX_BODY_BYTES = 1 << 32
FIRST_BYTES = 64  # without MAGIC, a first frame within these bytes means that MAGIC is damaged


class State(enum.IntEnum):
    """Condition of a segment, worst last. CUT: its writer was killed or still writes, or its end
    was lost. DAMAGED: some of its bytes were changed."""

    WHOLE = 0
    CUT = 1
    DAMAGED = 2


class FrameEncoder:
    """Encoder of the frames of one segment. crc: chained checksum of all bodies so far."""

    def __init__(self) -> None:
        self.crc = zlib.crc32(MAGIC)
        self._num_frames = 0

    def frame(self, body: bytes) -> bytes:
        """Return the frame of a msgpack body. Raises EngineError if the body is too large."""
        packed = zlib.compress(body, 1)
        if max(len(packed), len(body) // 4) > MAX_FRAME_BYTES:
            raise EngineError(f"{len(body):,} bytes are too much for one frame of a recording.")
        self.crc = zlib.crc32(packed, self.crc)
        head = _head(len(packed), self._num_frames, self.crc)
        self._num_frames += 1
        return head + packed

    def end(self) -> bytes:
        """Return the end frame."""
        return _head(END, self._num_frames, self.crc)


@dataclass
class Frames:
    """Bodies of a segment's frames, up to its end or to the first cut or damage. problem:
    description of the cut or damage. crc: chained checksum of all bodies."""

    bodies: list[bytes] = field(default_factory=list)
    state: State = State.WHOLE
    problem: str = ""
    crc: int = zlib.crc32(MAGIC)

    def take(self, data: bytes, at: int) -> int:
        """Read the frame at a byte offset. Return the next frame's offset, or -1 at the end."""
        num, end = len(self.bodies), _head(END, len(self.bodies), self.crc)
        if at + HEAD_BYTES > len(data):
            return self._take_rest(data[at:], end)
        head = _head_at(data, at)
        if head is None:
            return self._stop(State.DAMAGED, at, "the head of a frame is wrong")
        length, number, crc = head
        if number != num:
            return self._stop(State.DAMAGED, at, f"frame {number} stands in the place of {num}")
        begin, after = at + HEAD_BYTES, at + HEAD_BYTES + length
        if length == END:
            if crc != self.crc:
                return self._stop(State.DAMAGED, at, "the end does not fit what is before it")
            if begin < len(data):
                return self._stop(State.DAMAGED, begin, "there is data after the end")
            return -1
        if length > MAX_FRAME_BYTES:
            return self._stop(State.DAMAGED, at, f"frame {num} claims {length:,} bytes")
        if after > len(data):
            has_end = (_head_at(data, len(data) - HEAD_BYTES) or [0])[0] == END
            if has_end:
                return self._stop(State.DAMAGED, at, f"bytes are missing from frame {num}")
            return self._stop(State.CUT, at, f"frame {num} is not whole")
        packed = data[begin:after]
        if zlib.crc32(packed, self.crc) != crc:
            return self._stop(State.DAMAGED, at, f"frame {num} is not what was written")
        body = _unpacked(packed)
        if body is None:
            return self._stop(State.DAMAGED, at, f"frame {num} cannot be unpacked")
        self.bodies.append(body)
        self.crc = crc
        return after

    def _take_rest(self, rest: bytes, end: bytes) -> int:
        """Classify trailing bytes shorter than a head: CUT if they can begin the end frame (`end`)
        or a further frame, else DAMAGED."""
        number = end[SUM.size : 2 * SUM.size]
        is_head = number.startswith(rest[SUM.size : 2 * SUM.size])
        is_end = end.startswith(rest)
        if not is_end and (rest[: SUM.size] == end[: SUM.size] or not is_head):
            return self._stop(State.DAMAGED, -1, "its last bytes are wrong")
        return self._stop(State.CUT, -1, "it has no end")

    def _stop(self, state: State, at: int, problem: str) -> int:
        self.state = state
        self.problem = problem if at < 0 else f"{problem} (at byte {at:,})"
        return -1


def read_frames(data: bytes) -> Frames | None:
    """Return all frames of a recording's file, even if its MAGIC is cut off or damaged. Return None
    for another file."""
    found = Frames()
    if not data.startswith(MAGIC):
        if MAGIC.startswith(data):
            found._stop(State.CUT, -1, "it ends before its first frame")
            return found
        heads = (_head_at(data, at) for at in range(min(len(data), FIRST_BYTES)))
        if any(head is not None and head[1] == 0 for head in heads):
            found._stop(State.DAMAGED, 0, "its first bytes are wrong")
            return found
        return None
    at = len(MAGIC)
    while at >= 0:
        at = found.take(data, at)
    return found


def _head(length: int, number: int, crc: int) -> bytes:
    head = HEAD.pack(length, number, crc)
    return head + SUM.pack(zlib.crc32(head))


def _head_at(data: bytes, at: int) -> tuple[int, int, int] | None:
    """Return length, number and crc of the head at an offset; None unless its checksum matches."""
    if at < 0 or at + HEAD_BYTES > len(data):
        return None
    head = data[at : at + HEAD.size]
    if SUM.unpack_from(data, at + HEAD.size)[0] != zlib.crc32(head):
        return None
    length, number, crc = HEAD.unpack(head)
    return length, number, crc


def _unpacked(packed: bytes) -> bytes | None:
    unpacker = zlib.decompressobj()
    try:
        body = unpacker.decompress(packed, MAX_BODY_BYTES)
    except zlib.error:
        return None
    return body if unpacker.eof else None
