"""The model on a separate thread: answers, failures, closing and heartbeats."""

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.virtual.dry_run import RandomExecutor, dry_request, dry_run
from quire.base.clock import FakeClock
from quire.base.errors import EngineError
from quire.base.masks import MaskPromise
from quire.base.messages import Abort
from quire.base.plan import Plan, StepResult
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import SchedulerConfig
from quire.engine.executors.executor import failed_step
from quire.engine.executors.threaded import BACKGROUND_NICENESS, DeviceThread, ThreadedExecutor
from quire.engine.loop.core import EngineCore
from quire.engine.loop.in_flight import LEAD_S, NO_SAMPLING, SHARE, InFlight, StepInFlight
from quire.engine.observability.beating import BeatingExecutor
from quire.engine.observability.heartbeat import Heartbeat, HeartbeatReader
from tests.support.cases import in_turn
from tests.support.engine.failing_core import Bench, prompt, with_poison
from tests.support.models.reference_checkpoints import checkpoint

WAIT_S = 60.0  # a limit, not a time that passes
AGAIN_S = 5.0  # between two presses of Ctrl-C; a second one is rarely needed


@pytest.fixture(scope="module")
def folder() -> Path:
    return checkpoint("llama")


class Gated(RandomExecutor):
    """Carries out a plan for each release of the gate. began: set when the first plan arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.began = threading.Event()
        self.fails: Callable[[Plan], bool] = lambda plan: False
        self.ran: list[int] = []
        self.threads: set[str] = set()
        self.failure: StepResult | None = None

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        self.began.set()
        assert self.gate.acquire(timeout=WAIT_S)
        self.ran.append(plan.step_id)
        self.threads.add(threading.current_thread().name)
        if self.fails(plan):
            self.failure = failed_step(plan, "made to fail")
        super().submit(plan, masks)

    def next_result(self) -> StepResult:
        result = super().next_result()
        failure, self.failure = self.failure, None
        return failure or result


@pytest.fixture
def gated() -> Iterator[tuple[Gated, ThreadedExecutor]]:
    inner = Gated()
    executor = ThreadedExecutor(inner)
    yield inner, executor
    inner.gate.release(100)
    executor.close()


def test_submit_does_not_block_and_results_ring(gated: tuple[Gated, ThreadedExecutor]) -> None:
    inner, executor = gated
    rung = threading.Semaphore(0)
    executor.start(rung.release)
    for step_id in range(3):
        executor.submit(Plan(step_id))
    assert not executor.is_ready()
    for step_id in range(3):
        inner.gate.release()
        assert rung.acquire(timeout=WAIT_S)
        assert executor.is_ready()
        assert executor.next_result().step_id == step_id
    assert inner.threads == {"quire-device"}


def test_plans_in_flight_after_a_failed_one_are_not_run(
    gated: tuple[Gated, ThreadedExecutor],
) -> None:
    """Once their results are taken, the next plan runs again."""
    inner, executor = gated
    inner.fails = lambda plan: plan.step_id == 1
    inner.gate.release(100)
    for step_id in range(4):
        executor.submit(Plan(step_id))
    errors = [executor.next_result().error for _ in range(4)]
    assert errors == [None, "made to fail", *["a step before it failed"] * 2]
    executor.submit(Plan(4))
    assert executor.next_result().error is None
    assert inner.ran == [0, 1, 4]


def test_close_waits_only_for_the_running_step(gated: tuple[Gated, ThreadedExecutor]) -> None:
    inner, executor = gated
    for step_id in range(3):
        executor.submit(Plan(step_id))
    assert inner.began.wait(WAIT_S)
    closer = threading.Thread(target=executor.close)
    closer.start()
    inner.gate.release()
    closer.join(WAIT_S)
    assert not closer.is_alive() and inner.ran == [0]
    with pytest.raises(AssertionError, match="the executor is closed"):
        executor.submit(Plan(3))
    executor.close()


def test_interrupt_reaches_the_caller_and_the_step_continues(
    gated: tuple[Gated, ThreadedExecutor],
) -> None:
    """Ctrl-C while the main thread waits for a result: the result can be taken afterwards."""
    inner, executor = gated
    executor.submit(Plan(7))
    assert inner.began.wait(WAIT_S)
    main = threading.main_thread().ident
    assert main == threading.get_ident(), "only the main thread is interrupted"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # another test may ignore it
    is_raised = threading.Event()

    def press() -> None:
        """Send real signals. A signal just before the wait does not end it."""
        signal.pthread_kill(main, signal.SIGINT)
        while not is_raised.wait(AGAIN_S):
            signal.pthread_kill(main, signal.SIGINT)

    ctrl_c = threading.Thread(target=press)
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.start()
        executor.next_result()
    is_raised.set()
    ctrl_c.join()
    signal.signal(signal.SIGINT, before)
    inner.gate.release()
    assert executor.next_result().step_id == 7


def test_error_of_the_executor_stops_the_core() -> None:
    config = SchedulerConfig(4, 16, pipeline_depth=2)
    scheduler, inner = dry_run(8, 4, config, 32, False)

    def break_down(plan: Plan, masks: MaskPromise | None = None) -> None:
        raise EngineError("the device is lost")

    inner.submit = break_down  # type: ignore[method-assign]
    core = EngineCore(scheduler, ThreadedExecutor(inner), FakeClock(), RequestLimits(9, 32, 0, 4))
    core.add(dry_request("a", [1, 2], 4))
    for _ in range(2):
        with pytest.raises(EngineError, match="the device is lost"):
            core.step()
    core.close()


def test_unreferenced_core_ends_its_thread_and_frees_the_runner(folder: Path) -> None:
    bench = threaded_bench(folder, 2)
    bench.add("a", prompt(1, 9), 3)
    bench.finish()
    thread = next(t for t in threading.enumerate() if t.name == "quire-device")
    runner = weakref.ref(bench.runner)
    del bench
    gc.collect()
    thread.join(WAIT_S)
    assert not thread.is_alive() and runner() is None


def test_device_thread_returns_results_and_errors_of_calls() -> None:
    thread = DeviceThread()
    assert thread.call(lambda: threading.current_thread().name) == "quire-device"
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    thread.close()
    thread.close()


# ---- steps that fail ---------------------------------------------------------------------------


def threaded_bench(folder: Path, depth: int, **settings: object) -> Bench:
    bench = Bench(folder, pipeline_depth=depth, **settings)  # type: ignore[arg-type]
    executor = ThreadedExecutor(bench.core.executor)
    executor.start(bench.core.bell.ring)
    bench.core.executor = executor
    return bench


@pytest.mark.parametrize(("depth", "when"), in_turn((1, 2, 3), ("before", "after")))
def test_step_that_raises_fails_only_one_request(folder: Path, depth: int, when: str) -> None:
    bench = threaded_bench(folder, depth, when=when, max_num_seqs=3)
    bench.add("before", prompt(1, 9), 3)
    bench.add("poisoned", with_poison(prompt(2, 20), 11))
    for i in range(4):
        bench.add(f"later {i}", prompt(3 + i, 5 + 7 * i))
    bench.finish()
    assert bench.failed() == {"poisoned"}
    bench.assert_exact("before", *(f"later {i}" for i in range(4)))
    bench.core.close()


@pytest.mark.parametrize("depth", [2, 3])
def test_random_step_failures_and_aborts_fail_no_other_request(folder: Path, depth: int) -> None:
    """As when memory is short for moments. All other requests get exact answers."""
    bench = threaded_bench(folder, depth, max_num_seqs=3)
    names = [f"r{i}" for i in range(8)]
    for i, name in enumerate(names):
        bench.add(name, prompt(10 + i, 4 + 5 * i))
    bench.runner.raises = lambda plan: (
        plan.step_id % 3 == 0 and bench.runner.num_raised * 3 < plan.step_id + 1
    )
    for _ in range(6):
        bench.step()
    bench.core.control(Abort("r4"))
    bench.finish()
    assert bench.runner.num_raised > 2
    assert bench.failed() == set()
    bench.assert_exact(*(name for name in names if name != "r4"))
    bench.core.close()


# ---- heartbeats, and when to plan ----------------------------------------------------------------


def test_heartbeat_detects_a_hanging_step(
    tmp_path: Path, gated: tuple[Gated, ThreadedExecutor]
) -> None:
    """Even if another plan is submitted after it."""
    inner, threaded = gated
    clock, reader = FakeClock(100.0), HeartbeatReader(tmp_path / "beat")
    beat = Heartbeat(tmp_path / "beat", 0.0)
    executor = BeatingExecutor(threaded, beat, clock)
    executor.submit(Plan(0))
    clock.advance(6.0)
    executor.submit(Plan(1))
    assert not reader.is_stuck(clock.now())
    clock.advance(5.0)
    assert reader.is_stuck(clock.now())
    inner.gate.release()
    executor.next_result()  # it was only slow: the next step gets ten times that
    assert not reader.is_stuck(clock.now() + 100.0)
    assert reader.is_stuck(clock.now() + 120.0)
    inner.gate.release()
    executor.next_result()
    beat.wait(clock.now(), 1.0)  # an idle core sets the next deadline
    assert not reader.is_stuck(clock.now() + 10.9)
    assert reader.is_stuck(clock.now() + 11.1)


def test_next_plan_waits_for_requests_that_arrive_during_a_step() -> None:
    """A step takes a second. The core makes the next plan shortly before the step ends, so the plan
    includes requests that arrived until then."""
    clock, inner = FakeClock(50.0), Gated()
    config = SchedulerConfig(4, 16, pipeline_depth=2)
    scheduler, _ = dry_run(32, 4, config, 32, False)
    executor = ThreadedExecutor(inner)
    core = EngineCore(scheduler, executor, clock, RequestLimits(50_000, 32, 0, 4))
    rung = threading.Semaphore(0)
    core.bell.wake_up = rung.release
    assert core.rest_s() is None
    core.add(dry_request("first", [1, 2], 12))
    assert core.rest_s() == 0.0
    for _ in range(2):  # step times are unknown: both plans are made immediately
        core.advance()
    assert [flight.plan.step_id for flight in scheduler.planner.in_flight] == [0, 1]
    assert core.rest_s() is None
    clock.advance(1.0)
    inner.gate.release()
    assert rung.acquire(timeout=WAIT_S)
    assert core.rest_s() == 0.0
    assert len(core.advance().rows) == 1
    pause = core.rest_s()
    assert pause == pytest.approx(SHARE / 2 - LEAD_S)  # half of the last step's tokens
    assert not core.advance() and len(scheduler.planner.in_flight) == 1
    core.add(dry_request("second", [3, 4], 2))
    clock.advance(pause + 0.01)
    assert core.rest_s() == 0.0
    core.advance()
    assert scheduler.planner.in_flight[-1].plan.num_scheduled_tokens == 1 + 2
    inner.gate.release(100)
    while core.has_work:
        core.step()
    core.close()


def test_expected_step_time_is_bounded_by_the_last_step() -> None:
    in_flight = InFlight(1)

    def begin(num_tokens: int, now_s: float) -> None:
        plan = Plan(0)
        in_flight.begin(StepInFlight(plan, NO_SAMPLING, plan, num_tokens, None), now_s)

    begin(8, 10.0)
    assert in_flight.due_s == 10.0
    begin(4, 11.0)  # while the first one runs
    in_flight.end(12.0)
    assert in_flight.due_s == pytest.approx(12.0 + SHARE * 1.0 - LEAD_S)
    begin(100, 12.0)
    assert in_flight.due_s == pytest.approx(12.0 + SHARE * 3.0 - LEAD_S)
    in_flight.end(12.001)  # too short to wait
    assert in_flight.due_s == 12.001


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process has one priority")
def test_background_threads_have_a_lower_priority() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, names = niceness(), ("device", "background")
    threads = [DeviceThread(name, is_background=name == "background") for name in names]
    found = [thread.call(niceness) for thread in threads]
    for thread in threads:
        thread.close()
    assert found == [own, max(own, BACKGROUND_NICENESS)] and niceness() == own
