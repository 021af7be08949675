"""A changed recording is never read as whole, wherever the change is. A truncated recording is
reported as truncated."""

import random
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from quire.base.errors import ConfigError
from quire.cli.recordings import STATUS
from quire.engine.attachments import recorder as record
from quire.engine.recording.files import read_recording, read_segment, segment_paths
from quire.engine.recording.frames import (
    END,
    HEAD,
    HEAD_BYTES,
    MAGIC,
    SUM,
    FrameEncoder,
    State,
    read_frames,
)
from tests.support.commands import run as command
from tests.support.engine.failing_core import prompt
from tests.support.engine.recorded_runs import Run, begin_segment, replayed

FIRST_FORMAT = b"quire recording\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A segment of many small frames."""
    directory = tmp_path_factory.mktemp("recordings")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "FRAME_ITEMS", 3)
        made = Run(directory)
        for i in range(3):
            made.ask(f"r{i}", prompt(i, 9), 16)
        made.finish()
    [path] = segment_paths(directory)
    return path.read_bytes()


def bounds(data: bytes) -> list[tuple[int, int]]:
    """Return the beginning and end of each frame; the end frame is the last."""
    at, found = len(MAGIC), []
    while at < len(data):
        length = HEAD.unpack_from(data, at)[0]
        after = at + HEAD_BYTES + (0 if length == END else length)
        found.append((at, after))
        at = after
    return found


def state_of(data: bytes) -> State:
    frames = read_frames(data)
    assert frames is not None, "the data is not recognized as a recording"
    assert (frames.state is State.WHOLE) == (not frames.problem)
    return frames.state


def test_unchanged_recording_is_whole(whole: bytes, tmp_path: Path) -> None:
    frames = read_frames(whole)
    assert frames is not None and (frames.state, frames.problem) == (State.WHOLE, "")
    assert len(frames.bodies) == len(bounds(whole)) - 1 > 20


def test_any_flipped_bit_is_damage(whole: bytes) -> None:
    """Flip bits in MAGIC, in each byte of each frame head and of the end, and in some of each
    body."""
    rng = random.Random(1)
    places = set(range(len(MAGIC)))
    for start, end in bounds(whole):
        places |= set(range(start, min(start + HEAD_BYTES, end)))
        places |= {rng.randrange(start, end) for _ in range(4)} | {end - 1}
    for place in sorted(places):
        data = bytearray(whole)
        data[place] ^= 1 << rng.randrange(8)
        assert state_of(bytes(data)) is State.DAMAGED, place


CHANGES: dict[str, Callable[[bytes, int, int, random.Random], bytes]] = {
    "a byte put in": lambda d, a, b, r: (at := r.randrange(a, b), d[:at] + b"\x00" + d[at:])[1],
    "many bytes put in": lambda d, a, b, r: d[:a] + r.randbytes(99) + d[a:],
    "a byte taken out": lambda d, a, b, r: (at := r.randrange(a, b - 1), d[:at] + d[at + 1 :])[1],
    "bytes written over": lambda d, a, b, r: d[:a] + bytes(b - a) + d[b:],
    "the frame taken out": lambda d, a, b, r: d[:a] + d[b:],
    "the frame twice": lambda d, a, b, r: d[:b] + d[a:b] + d[b:],
    "the frame at the end": lambda d, a, b, r: d[:a] + d[b:] + d[a:b],
    "the frame at the beginning": lambda d, a, b, r: (
        (n := len(MAGIC)) and d[:n] + d[a:b] + d[n:a] + d[b:]
    ),
    "half of it taken out": lambda d, a, b, r: d[: (a + b) // 2] + d[b:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_at_each_frame_are_damage(whole: bytes, change: str) -> None:
    rng, num = random.Random(2), 0
    *frames, end = bounds(whole)
    for begin, after in frames:
        data = CHANGES[change](whole, begin, after, rng)
        if data == whole:  # the first frame is at the beginning
            continue
        num += 1
        assert state_of(data) is State.DAMAGED, (change, begin)
    assert num >= len(frames) - 1
    for name in ("a byte put in", "bytes written over", "the frame twice"):
        assert state_of(CHANGES[name](whole, *end, rng)) is State.DAMAGED
    for i in range(12):  # a missing last byte looks like truncation
        data = whole[: end[0] + i] + whole[end[0] + i + 1 :]
        assert state_of(data) is State.DAMAGED, i


def test_swapped_frames_are_damage(whole: bytes) -> None:
    *frames, _ = bounds(whole)
    for (a, b), (_, c) in zip(frames, frames[1:], strict=False):
        assert state_of(whole[:a] + whole[b:c] + whole[a:b] + whole[c:]) is State.DAMAGED
    lengths = {}
    for a, b in frames[2:]:  # two frames of the same length far from each other
        c, d = lengths.setdefault(b - a, (a, b))
        if c != a and whole[a:b] != whole[c:d]:
            data = whole[:c] + whole[a:b] + whole[d:a] + whole[c:d] + whole[b:]
            assert len(data) == len(whole) and state_of(data) is State.DAMAGED


def test_renumbered_frames_are_damage(whole: bytes) -> None:
    """A frame whose own head is right still does not match the checksum of the frames before it."""
    found = read_frames(whole)
    assert found is not None
    for omitted in range(len(found.bodies) - 1):
        forged, honest, data = FrameEncoder(), FrameEncoder(), MAGIC
        for number, body in enumerate(found.bodies):
            frame = honest.frame(body)
            if number == omitted:
                continue
            head = forged.frame(body)[:HEAD_BYTES]
            length, place, _ = HEAD.unpack_from(head)
            sums = HEAD.pack(length, place, honest.crc)
            data += sums + SUM.pack(zlib.crc32(sums)) + frame[HEAD_BYTES:]
        assert state_of(data) is State.DAMAGED, omitted


def test_truncated_recording_is_cut_not_damaged(whole: bytes) -> None:
    """This happens after kill -9 or on a full disk. A cut between two frames tears none of them."""
    for begin, end in bounds(whole):
        for at in {begin, begin + 1, begin + 5, begin + HEAD_BYTES, (begin + end) // 2, end - 1}:
            if at < len(whole):
                assert state_of(whole[:at]) is State.CUT, at
    for at in range(len(MAGIC)):
        assert state_of(whole[:at]) is State.CUT


def test_readable_frames_are_replayed_and_the_fault_is_reported(
    whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "segment-000001.rec"
    path.write_bytes(whole)
    everything = replayed(path)
    assert everything.state is State.WHOLE and not everything.notes
    assert "all plans identical" in everything.summary()
    begin, end = bounds(whole)[12]
    broken = bytearray(whole)
    broken[end - 1] ^= 4  # of the body, however short the frame is
    found = {}
    for state, data in ((State.DAMAGED, bytes(broken)), (State.CUT, whole[:begin])):
        path.write_bytes(data)
        outcome = found[state] = replayed(path)
        assert outcome.state is state
        assert 0 < outcome.num_calls < everything.num_calls
        assert "all plans that can be read are identical" in outcome.summary()
    assert found[State.DAMAGED].num_calls == found[State.CUT].num_calls
    assert found[State.DAMAGED].notes == [
        "segment-000001.rec is damaged: its content has changed (frame 12 is not what was written"
        f" (at byte {begin:,}))"
    ]
    assert "is cut off" in found[State.CUT].notes[0] and "has no end" in found[State.CUT].notes[0]


def test_invalid_content_with_valid_checksums_is_damage(whole: bytes, tmp_path: Path) -> None:
    frames = read_frames(whole)
    assert frames is not None
    for bodies in (
        [*frames.bodies[:9], msgspec.msgpack.encode([[99]])],
        [*frames.bodies[:9], b"\xc1"],
        [msgspec.msgpack.encode({"no": "format"}), *frames.bodies[1:]],
    ):
        encoder = FrameEncoder()
        data = MAGIC + b"".join(map(encoder.frame, bodies)) + encoder.end()
        path = tmp_path / "segment-000001.rec"
        path.write_bytes(data)
        assert replayed(path).state is State.DAMAGED


def test_damaged_first_frame_makes_a_segment_unreadable(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "segment-000001.rec"
    for at in (3, len(MAGIC) + 20, bounds(whole)[1][0] + 20):
        data = bytearray(whole)
        data[at] ^= 1
        path.write_bytes(data)
        segment = read_segment(path)
        assert segment.state is State.DAMAGED and not segment.is_readable
        assert replayed(path).num_calls == 0


def test_other_formats_are_rejected(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "segment-000001.rec"
    for data, number in (
        (FIRST_FORMAT + b"\x00" * 99, 1),
        (whole.replace(MAGIC, b"quire recording 3\n")[:99], 3),
    ):
        broken = bytearray(data)
        broken[30] ^= 1
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match=f"has the format {number}; this version reads 2"):
            read_segment(path)


# ---- several segments ------------------------------------------------------------------------


@pytest.fixture
def segments(tmp_path: Path) -> Path:
    """Four segments of one run, each continuing the one before, and one segment of a later run."""
    for name in ("first", "second"):
        made = Run(tmp_path / "run")
        for i in range(4 if name == "first" else 1):
            if i:
                begin_segment(made.recorder)
            made.ask(f"{name} {i}", prompt(i, 9), 20)
            made.step(6)
        made.finish()
    assert len(segment_paths(tmp_path / "run")) == 5
    outcome = replayed(tmp_path / "run")
    assert (outcome.state, outcome.num_requests) == (State.WHOLE, 5)
    follow = [segment.follows for segment in read_recording(tmp_path / "run")]
    assert follow == [False, True, True, True, False]
    return tmp_path / "run"


def test_missing_or_swapped_middle_segments_are_damage(segments: Path) -> None:
    first, second, third, fourth, fifth = segment_paths(segments)
    first.unlink()  # as the engine deletes old segments
    assert replayed(segments).state is State.WHOLE
    third.rename(segments / "kept")
    outcome = replayed(segments)
    assert outcome.state is State.DAMAGED
    assert "segment-000002.rec ends: one between them is missing" in outcome.notes[0]
    (segments / "kept").rename(third)
    assert replayed(segments).state is State.WHOLE
    second.rename(segments / "kept")
    third.rename(second)
    (segments / "kept").rename(third)
    assert replayed(segments).state is State.DAMAGED


def test_missing_last_segment_is_a_cut(segments: Path) -> None:
    *_, fourth, fifth = segment_paths(segments)
    fourth.unlink()
    outcome = replayed(segments)
    assert outcome.state is State.CUT and outcome.num_segments == 4
    assert "segment-000003.rec" in outcome.notes[0]
    assert "the segment that continues it" in outcome.notes[0]
    fifth.unlink()
    assert replayed(segments).state is State.CUT


def test_segment_after_a_damaged_one_is_still_read(segments: Path) -> None:
    second = segment_paths(segments)[1]
    before = replayed(segments)
    data = bytearray(second.read_bytes())
    data[-40] ^= 1
    second.write_bytes(data)
    outcome = replayed(segments)
    assert outcome.state is State.DAMAGED and len(outcome.notes) == 1
    assert outcome.num_segments == 5 and outcome.num_calls < before.num_calls
    second.write_bytes(data[:20])  # cut within the header
    outcome = replayed(segments)
    assert outcome.state is State.CUT and outcome.num_segments == 5


# ---- the commands ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["replay", "explain", "trace"])
def test_exit_status_of_each_command_shows_the_state(
    name: str, whole: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog
) -> None:
    path = tmp_path / "segment-000001.rec"
    words = [name, str(path), *(["--output", str(tmp_path / "t")] if name == "trace" else [])]
    begin, end = bounds(whole)[-6]
    broken = whole[: end - 1] + bytes([whole[end - 1] ^ 1]) + whole[end:]
    for state, data, message in (
        (State.WHOLE, whole, ""),
        (State.CUT, whole[:begin], "is cut off"),
        (State.CUT, whole[:30], "is cut off"),
        (State.DAMAGED, broken, "is damaged"),
        (State.DAMAGED, whole[:40] + b"?" + whole[40:], "is damaged"),
    ):
        path.write_bytes(data)
        caplog.clear()
        assert command(capsys, *words)[0] == STATUS[state]
        assert message in caplog.text and bool(message) == bool(caplog.text)
    assert [STATUS[state] for state in State] == [0, 4, 3]
    if name == "explain":
        path.write_bytes(whole[:30])
        assert command(capsys, *words, "r0")[0] == STATUS[State.CUT]
        assert "there is no request 'r0'" in caplog.text
    status, out, _ = command(capsys, name, "--help")
    assert status == 0 and "3 damaged recording, 4 truncated or unfinished recording" in " ".join(
        out.split()
    )
