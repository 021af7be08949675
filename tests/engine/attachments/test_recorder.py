"""Recordings replay to the same plans and contain no user text.

The recorded runs use a real (tiny) model and every field of a plan.

Covers `engine/recording/redact.py`.
"""

import errno
import logging
import os
import threading
from collections.abc import Sequence as Seq
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from quire.base.errors import ConfigError, EngineError
from quire.base.plan import Plan
from quire.engine.attachments import recorder as record
from quire.engine.attachments.recorder import Recorder
from quire.engine.recording.calls import END, UPDATE, PlanPrediction, calls_of, end_of, plan_fields
from quire.engine.recording.files import RecordingFiles, read_recording, read_segment, segment_paths
from quire.engine.recording.frames import State, read_frames
from quire.scheduler.core.names import Digester, Named
from quire.scheduler.policy.policies import make_block_hash
from quire.tools.replay import Outcome, replay_all, restored
from tests.scheduler.media.test_media_machine import PIXELS, MediaMachine
from tests.scheduler.test_held_machine import HeldMachine
from tests.scheduler.test_scheduler_machine import HybridMachine, MixedMachine, SchedulerMachine
from tests.support.cases import in_turn, slow_but
from tests.support.engine.failing_core import POISON, prompt, with_poison
from tests.support.engine.recorded_runs import SALT, STOP, Run, begin_segment
from tests.support.scheduler.state_machines import run_machine


def replayed(directory: Path) -> Outcome:
    outcome = replay_all(read_recording(directory))
    difference = outcome.difference
    assert difference is None, "\n".join(difference.lines())
    return outcome


@pytest.mark.parametrize(
    ("keeps_tokens", "mode", "depth"),
    in_turn([False, True], ["recompute", "swap"], [1, 2, 3]),
)
def test_full_run_replays_to_the_same_plans(
    tmp_path: Path, depth: int, mode: str, keeps_tokens: bool
) -> None:
    run = Run(tmp_path, keeps_tokens, pipeline_depth=depth, preemption_mode=mode)
    run.everything()
    outcome = replayed(tmp_path)
    assert outcome.num_requests == len(run.requests)
    assert outcome.num_steps > 20
    [segment] = read_recording(tmp_path)
    assert end_of(segment.items) == "closed" and not segment.is_cut
    plans = [call.plan for call in calls_of(segment.items) if call.plan]
    assert sum("forked" in plan for plan in plans) > 3
    assert sum("sources" in plan for plan in plans) >= 1
    assert any("moves" in plan for plan in plans)


def test_plan_prediction_restores_plans_without_rows() -> None:
    """A plan without rows may, for example, only copy blocks for a store."""
    ones = np.ones(2, np.int32)
    full = Plan(step_id=1, rows=ones, num_tokens=ones, computed_bound=ones)
    plans = [full, Plan(step_id=2), Plan(step_id=3), full.replace(step_id=4)]
    fields = [plan_fields(plan, None) for plan in plans]
    writer, reader = PlanPrediction(), PlanPrediction()
    assert [reader.complete(writer.shorten(each)) for each in fields] == fields


@pytest.mark.parametrize("policy", slow_but(("fifo", "srtf", "two-level"), "two-level"))
def test_every_scheduling_policy_replays(tmp_path: Path, policy: str) -> None:
    run = Run(tmp_path, scheduling_policy=policy, pipeline_depth=2)
    run.everything()
    replayed(tmp_path)


@pytest.mark.parametrize("keeps_tokens", [False, True])
def test_replay_uses_the_recorded_eviction_policy_and_hash(
    tmp_path: Path, keeps_tokens: bool
) -> None:
    chosen = {"eviction_policy": "lfu", "prefix_caching_hash_algo": "blake2b"}
    run = Run(tmp_path, keeps_tokens, **chosen)
    for i in range(3):
        run.ask(f"shared {i}", prompt(1, 40), 2)
        run.step(6)
    for i in range(12):
        run.ask(f"other {i}", prompt(2 + i, 20), 2)
        run.step(6)
    run.ask("shared again", prompt(1, 40), 2)
    run.finish()
    replayed(tmp_path)
    [segment] = read_recording(tmp_path)
    segment.header["settings"]["eviction_policy"] = "lru"
    assert replay_all([segment]).difference is not None
    blake2b, sha256 = map(make_block_hash, ("blake2b", "sha256"))
    assert restored(segment).memory.names.digester.block_hash is blake2b
    for name in chosen:  # recordings of earlier versions lack them
        del segment.header["settings"][name]
    assert restored(segment).memory.names.digester.block_hash is sha256


@pytest.mark.parametrize("keeps_tokens", [False, True])
def test_a_snapshot_keeps_the_eviction_policy(tmp_path: Path, keeps_tokens: bool) -> None:
    run = Run(tmp_path, keeps_tokens, eviction_policy="lfu")
    for i in range(10):
        run.ask(f"r{i}", prompt(i % 4, 20), 2)
        run.step(6)
        if i == 5:
            begin_segment(run.recorder)
    run.finish()
    segments = list(read_recording(tmp_path))
    assert len(segments) == 2
    replayed(tmp_path)
    assert replay_all(segments[1:]).difference is None


@pytest.mark.parametrize("keeps_tokens", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_failed_steps_replay(tmp_path: Path, depth: int, keeps_tokens: bool) -> None:
    """The recording has the result that the scheduler got after the failed step was retried."""
    run = Run(tmp_path, keeps_tokens, pipeline_depth=depth)
    run.bench.runner.raises = run.bench.runner.holds_poison
    shared = prompt(1, 16)
    for i in range(4):
        tokens = shared + prompt(i, 5)
        run.ask(f"r{i}", with_poison(tokens, 18) if i == 1 else tokens)
    run.finish()
    assert run.bench.runner.num_raised > 0
    replayed(tmp_path)
    [segment] = read_recording(tmp_path)
    results = [call.value for call in calls_of(segment.items) if call.kind == UPDATE]
    [errors] = [result.row_errors for result in results if result.row_errors]
    wanted = "the step failed: RuntimeError" + (": made to fail" if keeps_tokens else "")
    assert list(errors.values()) == [wanted]


def test_recordings_contain_nothing_of_a_prompt(tmp_path: Path) -> None:
    """Neither tokens in any encoding, texts, salts, tenants, nor digests open to brute force."""
    run = Run(tmp_path, preemption_mode="swap")
    secrets: list[bytes] = [SALT.encode(), STOP.encode(), b"somebody", b"tenant 0", b"tenant 1"]
    digests: set[bytes] = set()
    names = run.core.scheduler.memory.names

    class DigestSpy(Digester):
        def __call__(self, named: Seq[Named], block_size: int, counts: Seq[int]) -> None:
            super().__call__(named, block_size, counts)
            for each in named:
                digests.update(each.digests)
                digests.add(each.root)

    names.digester = DigestSpy()
    for i in range(4):  # segments begin while requests run
        run.ask(f"early {i}", prompt(30 + i, 20), 10, n=2)
        run.step(3)
        begin_segment(run.recorder)
    run.everything()
    assert len(digests) > 40
    secrets += [*digests, *(digest.hex().encode() for digest in digests)]
    secrets.append(run.core.scheduler.memory.names.fingerprint)
    for request in run.requests:
        for dtype in ("<i4", "<i8"):
            secrets.append(np.array(request.prompt_token_ids[:5], dtype).tobytes())
        secrets.append(bytes(request.prompt_token_ids[:5]))  # as msgpack encodes small integers
        output = run.bench.tokens[request.request_id]
        secrets += [bytes(output[:4])] if len(output) >= 4 else []
    found = [read for path in segment_paths(tmp_path) for read in bodies(path)]
    assert len(found) > 5
    for secret in secrets:
        if len(secret) >= 4:
            assert not any(secret in body for body in found), secret
    replayed(tmp_path)


def test_record_tokens_writes_prompts_and_salts(tmp_path: Path) -> None:
    run = Run(tmp_path, keeps_tokens=True)
    run.everything()
    body = b"".join(bodies(segment_paths(tmp_path)[0]))
    for request in run.requests:
        assert bytes(request.prompt_token_ids[:5]) in body
    assert SALT.encode() in body


def bodies(path: Path) -> list[bytes]:
    frames = read_frames(path.read_bytes())
    assert frames is not None
    return frames.bodies


class Recorded:
    """Random programs, recorded from a random call on, with segments that begin anywhere."""

    recorder: Recorder | None = None

    @rule(keeps_tokens=st.booleans())
    def record(self, keeps_tokens: bool) -> None:
        if self.recorder is None:
            number = len(list(self.folder.iterdir()))
            directory = self.folder / str(number)
            self.recorder = Recorder(self.scheduler, directory, 1_000_000_000, keeps_tokens)
            self.directory = directory
            self.core.attach(self.recorder)

    @rule()
    def begin_segment(self) -> None:
        if self.recorder is not None:
            begin_segment(self.recorder)

    def teardown(self) -> None:
        super().teardown()  # type: ignore[misc]
        if self.recorder is not None:
            self.recorder.close()
            replayed(self.directory)


@pytest.mark.parametrize("max_examples", [4, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    slow_but(
        [SchedulerMachine, MixedMachine, HybridMachine, HeldMachine, MediaMachine],
        *(HybridMachine, HeldMachine, MediaMachine),
    ),
)
def test_random_programs_replay_and_record_no_pixels(
    tmp_path: Path, kind: type, max_examples: int
) -> None:
    machine = type("RecordedMachine", (Recorded, kind), {"folder": tmp_path})
    run_machine(machine, max_examples)
    found = [read for path in tmp_path.rglob("*.rec") for read in bodies(path)]
    assert found and not any(PIXELS in body for body in found)


def test_segments_rotate_within_max_bytes(tmp_path: Path) -> None:
    """Each segment replays alone, and the newest segments stay."""
    run = Run(tmp_path, max_bytes=30_000)
    for round_ in range(15):
        run.ask(f"r{round_}", prompt(round_, 20), 10)
        run.step(3)
        begin_segment(run.recorder)
    run.finish()
    paths = segment_paths(tmp_path)
    assert 1 < len(paths) < 15
    assert sum(path.stat().st_size for path in paths) <= 30_000 + max(
        path.stat().st_size for path in paths
    )
    assert paths[-1].name >= "segment-000016.rec"
    outcome = replayed(tmp_path)
    assert outcome.num_segments == len(paths)
    for path in paths:
        replayed(path)
    assert outcome.state is State.WHOLE
    ends = [end_of(segment.items) for segment in read_recording(tmp_path)]
    assert ends == ["goes on"] * (len(paths) - 1) + ["closed"]


def test_full_segment_starts_the_next_one(tmp_path: Path) -> None:
    written = threading.Event()
    run = Run(tmp_path, max_bytes=8_000)
    run.ask("r", prompt(1, 5), 50)
    while len(segment_paths(tmp_path)) < 2:
        run.step()
        written.wait(0.01)  # the writer thread polls twenty times a second
        if not run.core.has_work:
            run.ask(f"r{len(run.requests)}", prompt(1, 5), 50)
    run.finish()
    replayed(tmp_path)


def test_second_run_adds_its_segment_after_the_first(tmp_path: Path) -> None:
    for i in range(2):
        run = Run(tmp_path)
        run.ask(f"run {i}", prompt(1, 9))
        run.finish()
    assert [path.name for path in segment_paths(tmp_path)] == [
        "segment-000001.rec",
        "segment-000002.rec",
    ]
    assert replayed(tmp_path).num_requests == 2


def test_truncated_file_replays_up_to_the_cut(tmp_path: Path, monkeypatch) -> None:
    """As after kill -9: the complete frames are replayed."""
    monkeypatch.setattr(record, "FRAME_ITEMS", 4)
    run = Run(tmp_path)
    run.everything()
    [path] = segment_paths(tmp_path)
    whole = replayed(path).num_calls
    data = path.read_bytes()
    start = len(data) - sum(len(body) for body in bodies(path)[2:]) // 4
    for share in (0.99, 0.7, 0.3):
        path.write_bytes(data[: start + int(share * (len(data) - start))])
        segment = read_segment(path)
        assert segment.is_cut and end_of(segment.items) is None, share
        outcome = replayed(path)
        assert 0 < outcome.num_calls < whole, share
        assert "cut off" in outcome.notes[0], share


def test_damaged_recordings_are_reported(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.ask("r", prompt(1, 9))
    run.finish()
    [path] = segment_paths(tmp_path / "run")
    data = bytearray(path.read_bytes())
    data[-25] ^= 1
    path.write_bytes(data)
    damaged = read_segment(path)  # the whole damaged frame is dropped
    assert damaged.state is State.DAMAGED and damaged.is_readable
    assert end_of(damaged.items) is None
    path.write_bytes(bytes(data[:40]))
    cut = read_segment(path)
    assert cut.is_cut and not cut.is_readable
    path.write_bytes(b"hello")
    with pytest.raises(ConfigError, match="not a quire recording"):
        read_segment(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_recording(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no recording in"):
        list(read_recording(tmp_path))
    with pytest.raises(EngineError, match="damaged"):
        list(calls_of([[99]]))
    with pytest.raises(EngineError, match="damaged|unknown kind"):
        list(calls_of([[0, 1.0, [1]], ["x"]]))


def test_unwritable_directory_fails_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ConfigError, match="cannot be written"):
        Run(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        Run(tmp_path / "file" / "below")


def test_full_disk_ends_only_the_recording(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.ask("before", prompt(1, 9))
    run.step(2)
    failed = threading.Event()

    def full(*_: object) -> int:
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING, "quire"):
        run.ask("meanwhile", prompt(2, 9))
        assert failed.wait(10)
        run.finish()  # joins the writer's thread
    assert not run.recorder.is_recording
    assert "No space left on device" in caplog.text
    assert run.core.scheduler.lifecycle.sequences == {}
    monkeypatch.undo()
    assert replayed(tmp_path).state is State.CUT


def test_slow_disk_leaves_a_gap_in_the_recording(
    tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine does not wait. A new segment begins when the disk has caught up."""
    monkeypatch.setattr(record, "MAX_QUEUED_ITEMS", 20)
    may_write, blocked = threading.Event(), threading.Event()
    append = RecordingFiles.append

    def slow(files: RecordingFiles, body: bytes) -> None:
        blocked.set()
        assert may_write.wait(30)
        append(files, body)

    monkeypatch.setattr(RecordingFiles, "append", slow)
    run = Run(tmp_path)
    assert blocked.wait(10)
    with caplog.at_level(logging.WARNING, "quire"):
        run.ask("lost", prompt(1, 9), 40)
        run.step(30)
    assert not run.recorder.is_recording
    assert "cannot be written fast enough" in caplog.text
    monkeypatch.setattr(record, "MAX_QUEUED_ITEMS", 1 << 14)
    may_write.set()
    pause = threading.Event()
    while not run.recorder.is_recording:
        pause.wait(0.01)
        run.step()
        if not run.core.has_work:
            run.ask(f"later {len(run.requests)}", prompt(2, 9), 40)
    run.ask("kept", prompt(3, 9))
    run.finish()
    first, second = read_recording(tmp_path)
    assert first.state is second.state is State.WHOLE
    assert first.items[-1] == [END, "the disk was too slow"]
    assert not second.header["follows"]
    replayed(tmp_path)


def test_closed_recorder_records_no_requests(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.recorder.close()
    run.ask("not recorded", prompt(1, 9))
    run.finish()
    assert replayed(tmp_path).num_requests == 0
    assert POISON not in run.bench.tokens["not recorded"]
