"""Failing steps in a GPU's runner, whose launches run immediately.

The programs, places and claims are the same as in `tests/engine/loop/test_recovery.py`.
"""

from collections import Counter

import pytest

from quire.engine.executors.launching import LaunchingExecutor
from quire.engine.executors.threaded import DeviceThread
from quire.ops.kernels.launch import INTERPRETED
from quire.runner.setup.built import BuiltRunner
from tests.engine.loop.test_recovery import PLACES, Cell, Engine, assert_same, run_program
from tests.runner.gpu.test_kernel_ops import devices  # noqa: F401 (a fixture)
from tests.support.models.reference_checkpoints import checkpoint, pool_bytes
from tests.support.runner.late_device import LateDevice, stand_in

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="the stand-in's memory is the CPU's")


class LaunchingDevice(LateDevice):
    """A device whose `run` raises the errors of a launch."""

    can_capture = False

    def run(self, work):  # type: ignore[no-untyped-def]
        arrival = super().run(work)
        self.work_until(arrival)
        return arrival


def gpu_engine(depth: int, num_blocks: int = 14) -> Engine:
    memory = pool_bytes(checkpoint("llama"), num_blocks, 4, 4)
    settings = {"attention_backend": "triton", "dtype": "float32", "device": "cpu"}
    return Engine(depth, kv_cache_memory_bytes=memory, **settings)


def launching(built: BuiltRunner) -> LaunchingExecutor:
    return LaunchingExecutor(built, DeviceThread())


@pytest.fixture(autouse=True)
def launches(devices: list[LateDevice], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    stand_in(monkeypatch, LaunchingDevice)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
def test_transient_fault_fails_no_request(depth: int) -> None:
    table: Counter[Cell] = Counter()
    expected = gpu_engine(1, 200).start(make_executor=launching)
    run_program(expected, 0, has_guilty=False)
    engine = gpu_engine(depth).start(table, make_executor=launching)
    run_program(engine, 0, has_guilty=False)
    assert_same(engine, expected, set())
    assert {place for _, place in table} >= {*PLACES[:5], "swap_out"}


@pytest.mark.slow
def test_fault_of_a_request_fails_that_request_alone() -> None:
    expected = gpu_engine(1, 200).start(make_executor=launching)
    run_program(expected, 1, has_guilty=False)
    engine = gpu_engine(3).start(Counter(), "sampling", launching)
    run_program(engine, 1, has_guilty=True)
    assert_same(engine, expected, {"r2", "r6"})
