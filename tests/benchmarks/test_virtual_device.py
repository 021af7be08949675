"""A step starts at the end of the one before it, or when it is handed over."""

import threading
import time

import numpy as np
import pytest

from benchmarks.virtual.virtual_device import VirtualDevice
from quire.base.plan import Plan


def test_steps_follow_each_other_and_waiting_is_counted() -> None:
    device, rung = VirtualDevice(step_s=0.01), threading.Semaphore(0)
    device.start(rung.release)
    rows = np.arange(3, dtype=np.int32)
    began = time.monotonic()
    for step_id in range(2):
        device.submit(Plan(step_id, sample_rows=rows))
    assert device.idle_s == 0.0
    for step_id in range(2):
        assert rung.acquire(timeout=60.0)
        assert device.is_ready()
        result = device.next_result()
        assert result.step_id == step_id and result.token_ids.shape == (3, 1)
        assert time.monotonic() >= began + (step_id + 1) * device.step_s
    assert not device.is_ready()
    device.submit(Plan(2))  # the device has waited since the end of step 1
    assert 0.0 < device.idle_s <= time.monotonic() - began - 2 * device.step_s
    assert device.busy_s == pytest.approx(3 * device.step_s)
    device.next_result()
    device.close()
