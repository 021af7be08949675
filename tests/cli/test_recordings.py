"""`quire replay`, `explain` and `trace` on a recording that `generate` and `LLM` made."""

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.scheduler.core.planning import Planner
from tests.support.commands import run

PROMPTS = ["Once upon a time there was a fox", "Once upon a time there was a cow", "The sea"]


@pytest.fixture(scope="module", params=["1", "2"], ids=["depth 1", "depth 2"])
def recording(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "run"
    depth = int(request.param)
    with LLM(
        "demo", record=str(path), record_tokens=True, disable_log_stats=True, pipeline_depth=depth
    ) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.8, n=2), use_tqdm=False)
    return path


def test_replay_reports_identical_plans(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "replay", str(recording))
    assert status == 0
    assert "12 steps, 3 requests: all plans identical" in out
    [segment] = recording.iterdir()
    assert run(capsys, "replay", str(segment))[0] == 0


def test_replay_with_the_model_reports_identical_plans(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "replay", str(recording), "--with-model", "--log-level", "error")
    assert status == 0
    assert "all plans identical" in out


def test_replay_shows_the_first_difference(
    recording: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    serve = Planner._serve_running
    monkeypatch.setattr(
        Planner,
        "_serve_running",
        lambda self, *given: 0 if self.next_step_id == 5 else serve(self, *given),
    )
    monkeypatch.setattr(Planner, "_repeat", lambda self, last, now: None)
    status, out, _ = run(capsys, "replay", str(recording))
    assert status == 1
    assert out.startswith("step 5: whether there is a plan differs\n  recorded: a plan\n")
    assert out.endswith("5 steps before it are identical\n")


def test_playback_writes_frames(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "frames.jsonl"
    status, out, _ = run(
        capsys, "playback", str(recording), "--output", str(output), "--every", "0"
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert status == 0 and out.startswith(f"{len(lines) - 1} frames in ")
    assert [line["type"] for line in lines[:2]] == ["snapshot", "difference"]
    for every in ("-1", "nan"):
        status, _, err = run(
            capsys, "playback", str(recording), "--output", str(output), f"--every={every}"
        )
        assert status == 1 and "at least 0 seconds" in err


def test_explain_describes_requests(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "explain", str(recording), "1")
    lines = out.splitlines()
    assert (status, lines[0]) == (0, "request 1")
    assert lines[-1].startswith("  ended after ") and "in 2 sequences" in lines[-1]
    status, out, _ = run(capsys, "explain", str(recording))
    assert [line.split(":")[0] for line in out.splitlines()] == ["0", "1", "2"]
    status, out, _ = run(capsys, "explain", str(recording), "2", "--json")
    assert json.loads(out)[0]["state"] == "finished"
    status, _, err = run(capsys, "explain", str(recording), "77")
    assert status == 1 and "there is no request '77'" in err


def test_trace_writes_a_perfetto_file(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.json"
    status, out, _ = run(capsys, "trace", str(recording), "--output", str(output))
    assert status == 0 and "ui.perfetto.dev" in out
    assert json.loads(output.read_text())["traceEvents"]
    status, _, err = run(capsys, "trace", str(recording), "--output", str(tmp_path / "no" / "x"))
    assert status == 1 and "cannot be written" in err


@pytest.mark.parametrize("command", ["replay", "explain"])
def test_missing_recording_is_reported(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, text in ((tmp_path / "none", "cannot be read"), (tmp_path, "no recording")):
        status, _, err = run(capsys, command, str(path))
        assert status == 1 and text in err


def test_unwritable_record_is_reported(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    status, _, err = run(capsys, "generate", "Hi", "--record", str(tmp_path / "file"))
    assert status == 1 and "record=" in err and "cannot be written" in err
