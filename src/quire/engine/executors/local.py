"""A model in this process: loaded, and with what carries out its plans."""

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
    """built: the runner. draft: carries out a drafter's orders, in the thread of the runner.
    idle: does what is useful while no step is to be done; whether there was something."""

    built: BuiltRunner
    executor: Executor
    draft: Draft
    idle: Callable[[], bool]


def _executor(built: BuiltRunner) -> InProcessExecutor:
    return InProcessExecutor(built, lambda: check_usable(built.device))


def build_local(build: Build, device: str, *, is_threaded: bool, idles: bool = True) -> LocalModel:
    """Let a runner be built in the thread in which it will work: the caller's, unless steps are to
    go on beside it or the device works beside the host. device: as the settings name it. idles:
    idle moments are used; else by `LocalModel.idle` alone."""
    if choose_device(device).type == "cpu" and not is_threaded:
        built = build()
        if not built.is_async:
            return LocalModel(built, _executor(built), built.guess, built.runner.idle)
        thread = DeviceThread()  # Triton's interpreter in a GPU's place
    else:
        thread = DeviceThread()
        built = thread.call(build)

    def draft(order: DraftOrder) -> DraftAnswer:
        return thread.call(lambda: built.guess(order))

    def idle() -> bool:
        return thread.call(built.runner.idle)

    if built.is_async:
        return LocalModel(built, LaunchingExecutor(built, thread, idles=idles), draft, idle)
    return LocalModel(built, ThreadedExecutor(_executor(built), thread), draft, idle)
