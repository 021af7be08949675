"""Replays detect a scheduler that plans differently, with the step, the field and the values.

Covers `tools/replay_model.py`.
"""

from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError, EngineError
from quire.base.messages import Steer
from quire.engine.recording.calls import calls_of
from quire.engine.recording.files import read_recording
from quire.kv.manager import KVManager
from quire.scheduler.core import rows
from quire.scheduler.core.names import BlockNaming
from quire.scheduler.core.planning import Planner
from quire.scheduler.decisions import Decisions
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.steering import Steering
from quire.tools import replay_model
from quire.tools.replay import replay_all, restored
from tests.support.engine.failing_core import prompt
from tests.support.engine.recorded_runs import Run, begin_segment, replayed

CHANGED_AT = 6  # step


@pytest.fixture(params=[False, True], ids=["redacted", "tokens"])
def recording(request, tmp_path: Path) -> Path:
    run = Run(tmp_path / "run", keeps_tokens=request.param, pipeline_depth=2)
    for i in range(5):
        run.ask(f"r{i}", prompt(1, 12) + prompt(i, 9), 10)
    run.finish()
    return tmp_path / "run"


def difference_of(recording: Path):
    found = replay_all(read_recording(recording)).difference
    assert found is not None
    return found


def test_pauses_and_priorities_are_replayed(tmp_path: Path, monkeypatch) -> None:
    run = Run(tmp_path / "run", keeps_tokens=True)
    for i in range(3):
        run.ask(f"r{i}", prompt(i, 9), 12)
    for i in range(9):
        run.core.control(Steer(f"r{i % 3}", priority=i % 2, pause_s=0.002 * (i % 4)))
        run.step(2)
    run.finish()
    replayed(tmp_path / "run")
    monkeypatch.setattr(Steering, "handlers", lambda self: {})
    assert difference_of(tmp_path / "run").during.startswith("schedule step")


def test_smaller_budget_is_detected(recording: Path, monkeypatch) -> None:
    schedule = Scheduler.schedule

    def stingy(self, now):
        if self.planner.next_step_id == 1:
            self.planner._token_budget = 20
        return schedule(self, now)

    monkeypatch.setattr(Scheduler, "schedule", stingy)
    found = difference_of(recording)
    assert (found.step_id, found.subject) == (1, "plan.num_tokens")
    assert found.recorded.startswith("2 entries; from entry ") or "entries" in found.recorded
    assert found.recorded != found.replayed
    assert found.during.startswith("schedule step 1 at ")
    assert found.before.startswith("schedule step 0 at ")
    assert found.lines()[0] == "step 1: plan.num_tokens differs"


def test_other_block_choice_is_detected(recording: Path, monkeypatch) -> None:
    """From the second step on, free blocks are taken from the other end."""
    schedule, done = Scheduler.schedule, []

    def other_end(self, now):
        if self.planner.next_step_id == 1 and not done:
            done.append(self.memory.kv.pools[0]._free.reverse())
        return schedule(self, now)

    monkeypatch.setattr(Scheduler, "schedule", other_end)
    found = difference_of(recording)
    assert found.step_id >= 1
    assert found.subject == "plan.block_writes"
    assert found.recorded.startswith("block_id: ")


def test_missing_plan_is_detected(recording: Path, monkeypatch) -> None:
    schedule = Scheduler.schedule

    def lazy(self, now):
        return Decisions() if self.planner.next_step_id == CHANGED_AT else schedule(self, now)

    monkeypatch.setattr(Scheduler, "schedule", lazy)
    found = difference_of(recording)
    assert (found.step_id, found.subject) == (CHANGED_AT, "whether there is a plan")
    assert (found.recorded, found.replayed) == ("a plan", "no plan")


def test_exception_is_a_difference(recording: Path, monkeypatch) -> None:
    def broken(self, *_):
        raise ZeroDivisionError

    monkeypatch.setattr(KVManager, "get_computed_blocks", broken)
    found = difference_of(recording)
    assert (found.step_id, found.subject) == (0, "the outcome")
    assert (found.recorded, found.replayed) == (
        "nothing was raised",
        "ZeroDivisionError was raised",
    )


def test_missing_prefix_look_up_is_detected(recording: Path, monkeypatch) -> None:
    """Without prefix hits more is computed. A recording without tokens also shows the look-up."""
    monkeypatch.setattr(BlockNaming, "is_indexed", lambda self, sequence: False)
    found = difference_of(recording)
    assert (found.step_id, found.subject) in ((0, "the look-up"), (1, "plan.computed_bound"))


def test_crash_of_the_recorded_scheduler_is_replayed(tmp_path: Path, monkeypatch) -> None:
    """The recording ends with the call that raised; the same scheduler raises again there."""
    run = Run(tmp_path)
    run.ask("r", prompt(1, 9), 20)
    run.step(3)
    update = Scheduler.update

    def broken(self, result, now):
        if result.step_id == 5:
            raise KeyError("a bug")
        return update(self, result, now)

    monkeypatch.setattr(Scheduler, "update", broken)
    with pytest.raises(Exception, match="cannot continue"):
        run.step(10)
    run.core.close()
    assert replay_all(read_recording(tmp_path)).difference is None
    monkeypatch.setattr(Scheduler, "update", update)
    found = difference_of(tmp_path)
    assert (found.recorded, found.replayed) == ("KeyError was raised", "nothing was raised")


def test_failed_call_is_recorded_with_its_new_block_names(tmp_path: Path, monkeypatch) -> None:
    """Otherwise a replay without tokens would diverge before it reaches the error."""

    def broken(self, builder, most, now):
        raise KeyError("a bug")

    monkeypatch.setattr(Planner, "_close", broken)
    run = Run(tmp_path)
    run.ask("r", prompt(1, 9), 20)
    with pytest.raises(Exception, match="cannot continue"):
        run.step()
    run.core.close()
    [segment] = read_recording(tmp_path)
    last = list(calls_of(segment.items))[-1]
    assert last.raised == "KeyError" and [len(new) for _, new in last.digests] == [2]
    assert replay_all(read_recording(tmp_path)).difference is None


def test_scheduler_attributes_may_change(recording: Path, monkeypatch) -> None:
    """A recording from the engine's start does not depend on the scheduler's data structures."""
    init = rows.RowTable.__init__

    def with_more(self, num_rows, max_model_len):
        init(self, num_rows, max_model_len)
        self.new_column = np.zeros(num_rows)

    monkeypatch.setattr(rows.RowTable, "__init__", with_more)
    monkeypatch.setattr(
        Scheduler, "schedule", lambda self, now, old=Scheduler.schedule: _use(self, old, now)
    )
    assert replay_all(read_recording(recording)).difference is None


def _use(scheduler, schedule, now):
    assert not scheduler.rows.table.new_column.any()
    return schedule(scheduler, now)


# ---- with the model --------------------------------------------------------------------------


def recorded(directory: Path, keeps_tokens: bool = True, **settings: object) -> None:
    run = Run(directory, keeps_tokens, **settings)
    run.everything()


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_model_gives_the_recorded_tokens(tmp_path: Path, depth: int) -> None:
    recorded(tmp_path, pipeline_depth=depth, preemption_mode="swap")
    outcome = replay_model.replay_with_model(read_recording(tmp_path), {})
    assert outcome.difference is None, outcome.difference.lines()
    assert "sampled tokens are identical" in outcome.notes[-1]


def test_other_model_is_detected(tmp_path: Path) -> None:
    from tests.support.models.reference_checkpoints import write_checkpoint

    recorded(tmp_path / "run")
    other = write_checkpoint(tmp_path / "other", "llama", 97, seed=3)
    segments = read_recording(tmp_path / "run")
    outcome = replay_model.replay_with_model(segments, {"model": str(other)})
    assert outcome.difference is not None
    assert outcome.difference.subject.startswith("the token of row ")


def test_model_replay_needs_tokens_and_the_start(tmp_path: Path) -> None:
    recorded(tmp_path / "without", keeps_tokens=False)
    with pytest.raises(ConfigError, match="record-tokens"):
        replay_model.replay_with_model(read_recording(tmp_path / "without"), {})
    run = Run(tmp_path / "late", keeps_tokens=True)
    run.ask("r", prompt(1, 9))
    run.step(2)
    begin_segment(run.recorder)
    run.finish()
    late = list(read_recording(tmp_path / "late"))[1:]
    with pytest.raises(ConfigError, match="engine's start"):
        replay_model.replay_with_model(late, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scheduling_policy", "{file}:Evil"),
        ("eviction_policy", "{file}:Evil"),
        ("prefix_caching_hash_algo", "{file}:evil"),
        ("scheduler_extensions", ["{file}:Evil"]),
    ],
)
def test_recording_cannot_choose_the_code_that_runs(
    recording: Path, tmp_path: Path, name: str, value: str | list[str]
) -> None:
    """An untrusted recording may name a file, which is not run."""
    file = tmp_path / "evil.py"
    file.write_text("raise SystemExit('the file of a recording ran')\n")
    named = value.format(file=file) if isinstance(value, str) else [value[0].format(file=file)]
    [segment] = read_recording(recording)
    segment.header["settings"][name] = named
    with pytest.raises(EngineError, match="the recording names"):
        restored(segment)
