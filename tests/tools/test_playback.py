"""Playback of a recording gives the frames of a live view, block by block, and the stories."""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.base.plan import Plan
from quire.engine.observability.live import LiveTally
from quire.engine.observability.metrics import EngineMetrics
from quire.engine.observability.timeline import in_words
from quire.engine.recording.files import read_recording
from quire.serve.native.live_events import snapshot
from quire.tools import playback
from quire.tools.explain import timelines_of
from quire.tools.playback import write_playback
from quire.tools.replay import Outcome, replay_all
from tests.serve.api.test_live import Viewer
from tests.support.cases import slow_but
from tests.support.engine.recorded_runs import Run, begin_segment

SAME = ("groups", "running", "num_running", "waiting", "num_waiting", "pinned", "host")


def played(recording: Path, every_s: float = 0.0) -> list[dict[str, Any]]:
    output = recording.with_suffix(".jsonl.gz")
    outcome = Outcome()
    num_frames = write_playback(recording, output, every_s, outcome)
    assert outcome.difference is None
    lines = [json.loads(line) for line in gzip.decompress(output.read_bytes()).splitlines()]
    assert len(lines) == num_frames + 1 and lines[-1]["type"] == "stories"
    return lines


def steps_of(recording: Path) -> list[Plan]:
    plans: list[Plan] = []
    replay_all(
        read_recording(recording),
        lambda segment, step, _: plans.append(step.plan) if step.plan is not None else None,
    )
    return plans


@pytest.mark.parametrize(
    ("num_steps", "key_frames"),
    [
        pytest.param(steps, frames, marks=[] if number % 2 == f else pytest.mark.slow)
        for number, steps in enumerate((1, 7, 20, 0))
        for f, frames in enumerate((1000, 3))
    ],
)
def test_frames_add_up_to_the_engines_state(
    tmp_path: Path, num_steps: int, key_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last frame of a recording is the engine's state at its end."""
    monkeypatch.setattr(playback, "KEY_FRAMES", key_frames)
    run = Run(tmp_path / "run", preemption_mode="swap", pipeline_depth=2)
    run.ask("early", list(range(20)), 40)
    run.step(3)
    begin_segment(run.recorder)
    if num_steps:
        for i in range(4):
            run.ask(f"later {i}", list(range(14 + i)), 20, n=1 + i % 2)
        run.step(num_steps)
        run.recorder.close()
    else:
        run.everything()
    *frames, stories = played(tmp_path / "run")
    viewer, step_ids = Viewer(), []
    for frame in frames:
        step_ids += [step["step"] for step in frame.get("steps", [])]
        viewer.take(frame)
    scheduler = run.core.scheduler
    truth = snapshot(LiveTally().frame(1, 0.0, scheduler.live_state()))
    truth = msgspec.json.decode(msgspec.json.encode(truth))
    assert {name: viewer.known[name] for name in SAME} == {name: truth[name] for name in SAME}
    moves = [move for step in steps_of(tmp_path / "run") for move in step.moves]
    for kind in ("copy", "swap_out"):
        counted = viewer.counts.get(kind, 0)
        assert counted == sum(len(move.source) for move in moves if move.kind == kind)
    assert step_ids == list(range(step_ids[-1] + 1)), "each step appears once"
    lines = timelines_of(read_recording(tmp_path / "run"))[0]
    every = [*lines.ended.values(), *lines.open.values()]
    assert stories["requests"] == {
        line.request_id: in_words(line, lines.block_size) for line in every
    }
    snapshots = [i for i, frame in enumerate(frames) if frame["type"] == "snapshot"]
    assert snapshots == list(range(0, len(frames), key_frames))


def test_two_runs_in_one_directory_are_played(tmp_path: Path) -> None:
    """The second run has another pool and numbers its steps from 0."""
    for num_blocks in (20, 26):
        run = Run(tmp_path / "run", num_blocks=num_blocks)
        run.ask("one", list(range(20)), 8)
        run.finish()
        run.recorder.close()
    *frames, _ = played(tmp_path / "run")
    whole = [frame for frame in frames if frame["type"] == "snapshot"]
    sizes = [len(frame["groups"][0]["states"]) for frame in whole]
    assert len(sizes) == 2 and sizes[0] < sizes[1]
    steps = [step["step"] for frame in frames for step in frame.get("steps", [])]
    assert steps == [*range(len(steps) // 2)] * 2


def test_frames_keep_the_given_interval(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.everything()
    every_s = 0.005
    *frames, _ = played(tmp_path / "run", every_s)
    times = [frame["at_s"] for frame in frames]
    apart = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert len(frames) > 4 and min(apart[:-1]) >= every_s - 1e-4
    assert len(frames) < len(played(tmp_path / "run")) - 1


def test_missing_recording_and_unwritable_output_are_reported(tmp_path: Path) -> None:
    output = tmp_path / "frames.jsonl"
    with pytest.raises(ConfigError, match="no recording"):
        write_playback(tmp_path, output, 0.0, Outcome())
    assert not output.exists()
    run = Run(tmp_path / "run")
    run.ask("one", list(range(20)), 4)
    run.step(3)
    run.recorder.close()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_playback(tmp_path / "run", tmp_path / "no" / "where", 0.0, Outcome())


def test_frame_times_equal_the_engines_metrics(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    metrics = EngineMetrics(run.core.view().num_rows, 96, True)
    run.core.subscribe(metrics)
    run.everything()
    *frames, _ = played(tmp_path / "run")
    first = metrics.histograms["time_to_first_token_seconds"]
    counted = [frame["first_ms"] for frame in frames if "first_ms" in frame]
    assert 4 < len(counted) <= first.counts.sum()
    assert min(counted) > 0 and max(counted) <= 1e3 * first.total
    next_ms = [frame["next_ms"] for frame in frames if "next_ms" in frame]
    mean = metrics.histograms["inter_token_latency_seconds"]
    assert abs(np.mean(next_ms) - 1e3 * mean.total / mean.counts.sum()) < 1.0


@pytest.mark.parametrize("policy", slow_but(["fifo", "srtf", "two-level"], "two-level"))
def test_watched_run_is_replayed_and_played(tmp_path: Path, policy: str) -> None:
    """A live view makes no look-ups, which would name blocks too early."""
    run = Run(tmp_path / "run", scheduling_policy=policy, max_num_seqs=3)
    run.core.subscribe(lambda event: run.core.scheduler.live_state() and None)
    run.everything()
    outcome = replay_all(read_recording(tmp_path / "run"))
    assert outcome.difference is None
    assert len(played(tmp_path / "run")) > outcome.num_steps
