"""Executor that renews the core's heartbeat with each result."""

from collections.abc import Callable

from quire.base.clock import Clock
from quire.base.masks import MaskPromise
from quire.base.plan import Plan, StepResult
from quire.engine.executors.executor import Executor
from quire.engine.observability.heartbeat import Heartbeat


class BeatingExecutor:
    """Executor that renews the heartbeat's deadline with each result of an inner executor, so that
    a step repeated in parts does not look stuck. `submit` renews it only with no plan in flight."""

    def __init__(self, executor: Executor, heartbeat: Heartbeat, clock: Clock) -> None:
        self._executor = executor
        self._heartbeat = heartbeat
        self._clock = clock
        self._num_unanswered = 0

    def start(self, on_result: Callable[[], None]) -> None:
        self._executor.start(on_result)

    def copy_bytes_per_s(self) -> float:
        return self._executor.copy_bytes_per_s()

    def submit(self, plan: Plan, masks: MaskPromise | None = None) -> None:
        if self._num_unanswered == 0:
            self._heartbeat.begin(self._clock.now())
        self._num_unanswered += 1
        self._executor.submit(plan, masks)

    def is_ready(self) -> bool:
        return self._executor.is_ready()

    def next_result(self) -> StepResult:
        result = self._executor.next_result()
        self._num_unanswered -= 1
        self._heartbeat.end(self._clock.now())
        return result

    def close(self) -> None:
        self._executor.close()
