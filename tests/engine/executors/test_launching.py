"""An executor that launches ahead: order, failed launches, device errors, and its close."""

import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.base.errors import EngineError
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.engine.executors import launching, threaded
from quire.engine.executors.launching import LaunchingExecutor
from quire.engine.executors.threaded import DeviceThread

WAIT_S = 10.0


def plan(number: int) -> Plan:
    return Plan(number, rows=np.zeros(1, np.int32))


class Step:
    """A step that ends when the test puts a value into its gate."""

    def __init__(self, step: Plan) -> None:
        self._step = step
        self.gate: queue.Queue[str] = queue.Queue()

    def is_done(self) -> bool:
        return not self.gate.empty()

    def end(self) -> StepResult:
        trouble = self.gate.get(timeout=WAIT_S)
        if trouble:
            raise RuntimeError(trouble)
        return StepResult(self._step.step_id, np.zeros((1, 1), np.int32), np.ones(1, np.int32))


class Runner:
    """Launches every plan except the refused ones."""

    launches = True

    def __init__(self) -> None:
        self.launched: queue.Queue[Step] = queue.Queue()
        self.refuses: set[int] = set()
        self.idles = 0
        self.was_idle = threading.Event()

    def launch(self, step: Plan, masks: MaskPromise | None = None) -> Step:
        if step.step_id in self.refuses:
            raise ValueError(f"no {step.step_id}")
        made = Step(step)
        self.launched.put(made)
        return made

    def idle(self) -> bool:
        self.idles += 1
        if self.idles == 3:
            self.was_idle.set()
        return self.idles < 3


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def executor(runner: Runner) -> Any:
    built: Any = SimpleNamespace(
        runner=runner, copy_bytes_per_s=5.0, device=SimpleNamespace(type="cpu")
    )
    made = LaunchingExecutor(built, DeviceThread())
    yield made
    while not runner.launched.empty():
        runner.launched.get().gate.put("")
    made.close()


def test_step_is_launched_before_the_last_one_has_ended(
    executor: LaunchingExecutor, runner: Runner
) -> None:
    rung: queue.Queue[None] = queue.Queue()
    executor.start(lambda: rung.put(None))
    executor.submit(plan(1))
    executor.submit(plan(2))
    first, second = (runner.launched.get(timeout=WAIT_S) for _ in range(2))
    assert not executor.is_ready()
    second.gate.put("")  # its result cannot overtake the first one's
    assert rung.empty() and not executor.is_ready()
    first.gate.put("")
    rung.get(timeout=WAIT_S)
    assert executor.is_ready()
    assert [executor.next_result().step_id for _ in range(2)] == [1, 2]


def test_failed_launch_fails_the_plans_in_flight_after_it(
    executor: LaunchingExecutor, runner: Runner
) -> None:
    runner.refuses = {2}
    for number in (1, 2, 3):
        executor.submit(plan(number))
    runner.launched.get(timeout=WAIT_S).gate.put("")
    results = [executor.next_result() for _ in range(3)]
    assert [result.error for result in results] == [
        None, "ValueError: no 2", "a step before it failed"
    ]  # fmt: skip
    assert runner.launched.empty(), "the third plan was launched"
    executor.submit(plan(4))  # does not depend on the failed plan
    runner.launched.get(timeout=WAIT_S).gate.put("")
    assert executor.next_result().error is None


def test_device_error_ends_the_engine(executor: LaunchingExecutor, runner: Runner) -> None:
    executor.submit(plan(1))
    runner.launched.get(timeout=WAIT_S).gate.put("an illegal memory access")
    with pytest.raises(EngineError, match="illegal memory access.*restart the process"):
        executor.next_result()


def test_partial_launch_ends_the_engine(
    executor: LaunchingExecutor, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(step: Plan, masks: MaskPromise | None = None) -> Step:
        raise EngineError("half of it was launched")

    monkeypatch.setattr(runner, "launch", launch)
    executor.submit(plan(1))
    with pytest.raises(EngineError, match="half of it"):
        executor.next_result()


def test_device_lost_at_a_launch_ends_the_engine(
    executor: LaunchingExecutor, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_lost(device: Any) -> None:
        raise RuntimeError("the context is gone")

    monkeypatch.setattr(launching, "check_usable", is_lost)
    runner.refuses = {1}
    executor.submit(plan(1))
    with pytest.raises(EngineError, match=r"raised ValueError: no 1.*the context is gone"):
        executor.next_result()


def test_idle_work_runs_until_none_is_left(executor: LaunchingExecutor, runner: Runner) -> None:
    executor.submit(plan(1))
    runner.launched.get(timeout=WAIT_S).gate.put("")
    assert executor.next_result().error is None
    assert runner.was_idle.wait(WAIT_S)
    executor.close()
    assert runner.idles == 3


def test_no_idle_work_runs_between_two_steps(
    executor: LaunchingExecutor, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even with one plan in flight, when the thread is briefly idle after each result."""
    monkeypatch.setattr(threaded, "IDLE_S", WAIT_S)
    for number in range(5):
        executor.submit(plan(number))
        runner.launched.get(timeout=WAIT_S).gate.put("")
        assert executor.next_result().step_id == number
    executor.close()
    assert runner.idles == 0


def test_no_idle_work_runs_while_a_step_runs(
    executor: LaunchingExecutor, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has nothing to launch, but idle work would delay the next plan."""
    monkeypatch.setattr(threaded, "IDLE_S", 0.0)
    executor.submit(plan(1))
    runner.launched.get(timeout=WAIT_S).gate.put("")
    executor.next_result()
    assert runner.was_idle.wait(WAIT_S)
    executor.submit(plan(2))
    step = runner.launched.get(timeout=WAIT_S)
    executor._launching.do_when_idle(executor._steps.idle)
    executor._launching.call(lambda: None)
    assert executor._launching.call(executor._steps.idle), "there may be something to do later"
    assert runner.idles == 3
    step.gate.put("")
    executor.next_result()


def test_close_waits_for_launched_steps(executor: LaunchingExecutor, runner: Runner) -> None:
    executor.submit(plan(1))
    step = runner.launched.get(timeout=WAIT_S)
    closing = threading.Thread(target=executor.close)
    closing.start()
    assert closing.is_alive()
    step.gate.put("")
    closing.join(WAIT_S)
    assert not closing.is_alive()
    with pytest.raises(AssertionError, match="closed"):
        executor.submit(plan(2))


def test_close_checks_the_device_after_idle_work(
    executor: LaunchingExecutor, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost device does not prevent the close."""
    seen: list[int] = []

    def is_lost(device: Any) -> None:
        seen.append(runner.idles)
        raise RuntimeError("lost")

    monkeypatch.setattr(launching, "check_usable", is_lost)
    executor.submit(plan(1))
    runner.launched.get(timeout=WAIT_S).gate.put("")
    executor.next_result()
    assert runner.was_idle.wait(WAIT_S)
    executor.close()
    assert seen == [runner.idles] == [3]
