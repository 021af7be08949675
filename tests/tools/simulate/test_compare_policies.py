"""Effects that another policy would have had on a recording."""

import json
from pathlib import Path

import pytest

from quire.base.errors import ConfigError
from quire.cli.main import main
from quire.tools.simulate.compare_policies import compare_policies, lines_of
from quire.tools.simulate.recorded import Recorded, read_recorded
from tests.support.engine.failing_core import prompt
from tests.support.engine.recorded_runs import Run, begin_segment
from tests.support.plugin_site import EXAMPLES


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a run in which requests queue for two rows."""
    path = tmp_path_factory.mktemp("recording")
    run = Run(path, max_num_seqs=2, scheduling_policy="fifo")
    for i in range(9):
        run.clock.advance(0.0003)
        run.ask(f"r{i}", prompt(20 + i, 3 + i), num=4 + i)
    run.finish()
    run.recorder.close()
    return path


@pytest.fixture(scope="module")
def recorded(folder: Path) -> Recorded:
    return read_recorded(folder)


@pytest.fixture
def lifo(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(EXAMPLES["quire_lifo"][0], encoding="utf-8")
    return f"{tmp_path / 'mine.py'}:Lifo"


def test_recorded_policy_changes_nothing(recorded: Recorded) -> None:
    found = compare_policies(recorded, "fifo")
    assert (found.num_moved, found.max_moved, found.num_skipped) == (0, 0, 0)
    assert [each.gain_s for each in found.changes] == [0.0] * 9
    assert found.before == found.after


def test_last_in_first_out_serves_late_requests_earlier(recorded: Recorded, lifo: str) -> None:
    ended: list[int] = []
    found = compare_policies(recorded, lifo, progress=ended.append)
    assert sum(ended) == 18 and found.after.policy == "Lifo"
    gains = {each.request_id: each.gain_s for each in found.changes}
    assert gains["r8"] > 0 > gains["r2"]
    first = {name: served.first_token_s for name, served in found.after.served.items()}
    assert first["8"] < first["5"] < first["2"]
    assert found.num_moved > 4 and found.max_moved > 3
    data, text = found.as_data(), "\n".join(lines_of(found))
    assert data["earlier"] + data["later"] <= data["requests"] == 9
    assert "9 requests of the recording" in text and "earliest: r8, " in text


def test_max_requests_limits_the_comparison(recorded: Recorded, lifo: str) -> None:
    assert len(compare_policies(recorded, lifo, max_requests=4).changes) == 4


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "'Faulty' failed: .* requests were never served"),
        ("raise ValueError('no')", "'Faulty' failed: .*no Compare"),
    ],
)
def test_faulty_policy_is_reported(
    body: str, message: str, recorded: Recorded, tmp_path: Path
) -> None:
    source = (
        "from quire.scheduler.core.queue import Fifo\n"
        "class Faulty(Fifo):\n"
        f"    def peek(self):\n        if not len(self): return None\n        {body}\n"
    )
    (tmp_path / "faulty.py").write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        compare_policies(recorded, f"{tmp_path / 'faulty.py'}:Faulty")


def test_recording_without_its_start_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ask("r0", prompt(3, 5))
    run.step(3)
    begin_segment(run.recorder)
    run.ask("r1", prompt(4, 5))
    run.finish()
    run.recorder.close()
    first, *_ = sorted(tmp_path.glob("*.rec"))
    first.unlink()
    with pytest.raises(ConfigError, match="does not begin with the engine's start"):
        compare_policies(read_recorded(tmp_path), "srtf")


def test_replay_command_compares_policies(
    folder: Path, lifo: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(folder), "--with-policy", lifo, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["policy"] for each in found["policies"]] == ["fifo", "Lifo"]
    assert main(["replay", str(folder), "--with-policy", "srtf"]) == 0
    assert "TTFT p99 (ms)" in capsys.readouterr().out
    assert main(["replay", str(folder), "--with-policy", "./nowhere.py:Mine"]) == 1
    assert "cannot be read from nowhere.py" in capsys.readouterr().err
    assert main(["replay", str(folder), "--with-policy", "srtf", "--with-model"]) == 1
    assert main(["replay", str(folder), "--with-policy", "srtf", "--max-requests", "0"]) == 1
    assert "--max-requests must be at least 1, got 0" in capsys.readouterr().err
    assert main(["replay", str(folder), "--json"]) == 1
    assert "belong to --with-policy" in capsys.readouterr().err
