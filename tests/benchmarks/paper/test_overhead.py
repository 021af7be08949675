"""The host's time in a step follows from measurements, and reaches every sampled row."""

import pytest

from benchmarks.paper.overhead import (
    BATCH,
    LATENCY_S,
    MIN_STEP_S,
    OUTPUT,
    EngineTimes,
    max_step_s,
    overhead,
    request_s,
)
from benchmarks.paper.settings import OPT_13B, host_times
from quire.tools.step_times import Roofline, StepLoad


def test_sampling_time_is_the_difference_of_measured_rates() -> None:
    answer = 6895.75 / 14.33 - 3024.07 / 12.29
    assert answer == pytest.approx(235, abs=1)
    assert request_s() * answer == pytest.approx(1 / 3.70 - 1 / 4.77)


def test_max_step_time_explains_the_measured_batch() -> None:
    """If the device's time is 0, all time but sampling is host time."""
    nothing = Roofline(weights_s=0.0, token_s=0.0)
    assert max_step_s(nothing) == pytest.approx(LATENCY_S / OUTPUT - BATCH * request_s())
    slow = Roofline(weights_s=0.0, token_s=0.0, fixed_s=0.01)
    assert max_step_s(nothing) - max_step_s(slow) == pytest.approx(0.01)


def test_host_time_lies_between_both_bounds() -> None:
    found = overhead(OPT_13B.device_times)
    assert MIN_STEP_S < found.step_s < max_step_s(OPT_13B.device_times) < 0.02
    assert found == host_times()


def test_step_times_include_the_host() -> None:
    """Rows of one request share its sampling time. The device's part does not change."""
    load = StepLoad(10, 100, 100, 6)
    device = OPT_13B.device_times.seconds_of(lambda window: load)
    for num_rows in (1, 6):
        times = OPT_13B.times(False, num_rows)
        assert isinstance(times, EngineTimes)
        host = times.seconds_of(lambda window: load) - device
        assert host == pytest.approx(host_times().step_s + 6 / num_rows * request_s())
    paged = OPT_13B.times(True).seconds_of(lambda window: load)
    assert paged > OPT_13B.times(False).seconds_of(lambda window: load)
