"""What carries out plans, and how: at once, or launched and answered later."""

from typing import Protocol

from quire.base.config import EngineConfig
from quire.base.plan import Plan, StepResult
from quire.ops.attention.base import AttentionBackend


class Pending(Protocol):
    """A step that was launched."""

    def is_done(self) -> bool: ...

    def result(self) -> StepResult:
        """Waits for it. What it raises has come from the device, which cannot go on."""
        ...


class Runner(Protocol):
    """`ModelRunner`, or `GpuRunner`. Whatever `run` or `launch` raises, the rows' counters have not
    moved, and the plan can be carried out again.

    launches: whether `launch` returns before the step has ended.
    """

    backend: AttentionBackend
    launches: bool

    def run(self, plan: Plan) -> StepResult:
        """Carry out one plan."""
        ...

    def launch(self, plan: Plan) -> Pending:
        """Begin with one plan, behind those before it."""
        ...

    def idle(self) -> bool:
        """Do something useful while there is no plan; whether there was something left to do."""
        ...

    def graph_bytes(self, config: EngineConfig) -> int:
        """Memory that recorded steps will take."""
        ...


class Finished:
    """A step that has ended already."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result
