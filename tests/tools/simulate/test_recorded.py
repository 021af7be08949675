"""A simulated recording repeats its plans, and step times can be fitted to a recording."""

from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.base.plan import Plan
from quire.cli.main import main
from quire.engine.recording.calls import plan_fields
from quire.tools.simulate.recorded import (
    Recorded,
    RecordedWork,
    is_recording,
    read_recorded,
    simulate_as_recorded,
)
from tests.support.engine.failing_core import prompt
from tests.support.engine.recorded_runs import Run

TOKENS = ("token_ids", "stop_token_ids", "eos_token_ids")


def without_tokens(plan: Plan) -> dict[str, object]:
    """Return a plan's fields without the tokens with which rows begin and end."""
    fields = plan_fields(plan, None)
    fields["started"] = [
        (s.row, len(s.token_ids), s.num_computed_tokens, s.num_prompt_tokens, s.sample_index)
        for s in plan.started
    ]
    return fields


@pytest.fixture(params=[True, False], ids=["with tokens", "without tokens"])
def recorded(tmp_path: Path, request: pytest.FixtureRequest) -> Recorded:
    """Record an engine's run with chunks, preemptions, prefix hits, an abort and a late request."""
    run = Run(tmp_path, keeps_tokens=request.param)
    shared = prompt(5, 16)
    for i in range(7):
        run.clock.advance(0.0003)
        run.ask(f"r{i}", [*shared, *prompt(20 + i, 3 + i)], num=4 + 3 * i)
        run.step()
    run.step(30)
    run.clock.advance(0.0003)
    run.ask("late", [*shared, *prompt(77, 9)], num=6)
    run.finish()
    run.recorder.close()
    return read_recorded(tmp_path)


def test_simulation_repeats_the_recorded_plans(recorded: Recorded) -> None:
    plans, run = simulate_as_recorded(recorded)
    expected = [step.plan for step in recorded.steps]
    assert len(expected) > 30
    assert any(plan.started for plan in expected[5:]) and any(
        (p.num_tokens > 1).any() for p in expected
    )
    assert [without_tokens(each) for each in plans] == [without_tokens(each) for each in expected]
    assert run.duration_s == pytest.approx(recorded.steps[-1].taken_s - recorded.begins_s)
    served = run.by_id["late"] if recorded.has_tokens else list(run.by_id.values())[-1]
    assert served.num_output == 6 and served.num_cached_tokens >= 16
    assert run.num_preemptions > 0


def test_requests_arrive_as_recorded_or_at_another_rate(recorded: Recorded) -> None:
    arrivals = list(RecordedWork(recorded, 97).arrivals())
    recorded_s = [each.at_s - recorded.begins_s for each in recorded.requests]
    assert [each.at_s for each in arrivals] == pytest.approx(recorded_s)
    assert [each.num_output for each in arrivals] == [4 + 3 * i for i in range(7)] + [6]
    faster = list(RecordedWork(recorded, 97, rate_per_s=1e6, max_requests=3).arrivals())
    assert len(faster) == 3 and faster[-1].at_s == pytest.approx(3e-6)
    prompts = [recorded.prompt(i, 97) for i in range(8)]
    assert all(each[:16] == prompts[0][:16] for each in prompts[::2])  # odd requests have a salt
    assert prompts[2][16:] != prompts[4][16 : len(prompts[2])]


def test_simulate_command_accepts_a_recording(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_recording(tmp_path) and is_recording(next(tmp_path.glob("*.rec")))
    words = ["simulate", "demo", "--device", "H100", "--trace", str(tmp_path)]
    assert main(words) == 0
    assert "Successful requests:                     8" in capsys.readouterr().out
    short = [step.duration_s for step in recorded.steps]
    assert np.median(short) > 0
    assert main([*words, "--fit", str(tmp_path), "--host-ms", "1"]) == 0
    assert "residuals of" in capsys.readouterr().out


def test_directory_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no recording"):
        read_recorded(tmp_path)
