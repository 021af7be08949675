"""A model loaded in this process, together with its executor."""

from collections.abc import Callable
from dataclasses import dataclass

from quire.base.plan import DraftAnswer, DraftOrder
from quire.engine.executors.executor import Executor, InProcessExecutor, check_usable
from quire.engine.executors.launching import LaunchingExecutor
from quire.engine.executors.threaded import DeviceThread, ThreadedExecutor
from quire.runner.build import choose_device
from quire.runner.setup.built import BuiltRunner

Draft = Callable[[DraftOrder], DraftAnswer]
Build = Callable[[], BuiltRunner]


@dataclass(frozen=True)
class LocalModel:
    """Model in this process. draft: runs a drafter's order on the runner's thread. idle: lets the
    runner record a graph, on the same thread, and returns whether it did."""

    built: BuiltRunner
    executor: Executor
    draft: Draft
    idle: Callable[[], bool]


def _executor(built: BuiltRunner) -> InProcessExecutor:
    return InProcessExecutor(built, lambda: check_usable(built.device))


def build_local(build: Build, device: str, *, is_threaded: bool, idles: bool = True) -> LocalModel:
    """Build a runner on the thread that will run it, and choose its executor. A synchronous CPU
    runner without `is_threaded` uses the caller's thread; all others get a device thread.

    idles: whether the executor uses idle moments by itself; if not, only `LocalModel.idle` does."""
    if choose_device(device).type == "cpu" and not is_threaded:
        built = build()
        if not built.is_async:
            return LocalModel(built, _executor(built), built.run_draft, built.runner.idle)
        thread = DeviceThread()  # asynchronous on a CPU: Triton's interpreter replaces a GPU
    else:
        thread = DeviceThread()
        built = thread.call(build)

    def draft(order: DraftOrder) -> DraftAnswer:
        return thread.call(lambda: built.run_draft(order))

    def idle() -> bool:
        return thread.call(built.runner.idle)

    if built.is_async:
        return LocalModel(built, LaunchingExecutor(built, thread, idles=idles), draft, idle)
    return LocalModel(built, ThreadedExecutor(_executor(built), thread), draft, idle)
