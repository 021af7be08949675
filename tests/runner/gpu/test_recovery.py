"""Failing steps in a GPU's runner, whose launches run at once, as CUDA takes them.

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
    """What a launch raises is raised by `run`."""

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
def test_a_fault_by_chance_costs_nobody(depth: int) -> None:
    table: Counter[Cell] = Counter()
    wanted = gpu_engine(1, 200).start(make_executor=launching)
    run_program(wanted, 0, has_guilty=False)
    engine = gpu_engine(depth).start(table, make_executor=launching)
    run_program(engine, 0, has_guilty=False)
    assert_same(engine, wanted, set())
    assert {place for _, place in table} >= {*PLACES[:5], "swap_out"}


@pytest.mark.slow
def test_a_fault_that_a_request_brings_costs_that_one() -> None:
    wanted = gpu_engine(1, 200).start(make_executor=launching)
    run_program(wanted, 1, has_guilty=False)
    engine = gpu_engine(3).start(Counter(), "sampling", launching)
    run_program(engine, 1, has_guilty=True)
    assert_same(engine, wanted, {"r2", "r6"})
