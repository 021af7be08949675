"""Durations from outside are limited, and no wait is longer than its bound."""

import math
import selectors

import pytest

from quire.base.clock import MAX_DURATION_S, MAX_WAIT_S, bounded_wait_s, is_duration
from quire.base.errors import ConfigError, RequestError
from quire.base.messages import Request
from quire.base.requests.sampling_params import SamplingParams
from quire.base.requests.validation import RequestLimits
from quire.base.settings.config import ServerConfig

LIMITS = RequestLimits(100, 64, 20, 4)
WRONG = [-1.0, math.inf, -math.inf, math.nan, MAX_DURATION_S * 1.001, 1e300]


@pytest.mark.parametrize("seconds", [0.0, 0.5, 24.9 * 86400, MAX_DURATION_S])
def test_durations_up_to_a_year_are_accepted(seconds: float) -> None:
    LIMITS.check(Request("r", [1], SamplingParams(), 0, timeout_s=seconds))
    LIMITS.check(Request("r", [1], SamplingParams(), 0, pin_s=seconds))
    assert ServerConfig(shutdown_timeout=seconds).shutdown_timeout == seconds


@pytest.mark.parametrize("seconds", WRONG)
def test_negative_infinite_and_longer_durations_are_rejected(seconds: float) -> None:
    assert not is_duration(seconds)
    with pytest.raises(RequestError, match="^timeout_s must be .* to 31622400, a year, got"):
        LIMITS.check(Request("r", [1], SamplingParams(), 0, timeout_s=seconds))
    with pytest.raises(RequestError, match="^ttl_s must be .* to 31622400, a year, got"):
        LIMITS.check(Request("r", [1], SamplingParams(), 0, pin_s=seconds))
    with pytest.raises(ConfigError, match="shutdown_timeout must be .* 31622400, a year, got"):
        ServerConfig(shutdown_timeout=seconds)


@pytest.mark.parametrize("received_s", [-1.0, math.inf, math.nan])
def test_invalid_received_times_are_rejected(received_s: float) -> None:
    with pytest.raises(RequestError, match="received_s"):
        LIMITS.check(Request("r", [1], SamplingParams(), 0, received_s=received_s))


@pytest.mark.parametrize("seconds", [*WRONG, None, 0.0, 0.3, MAX_DURATION_S])
def test_epoll_accepts_every_bounded_wait(seconds: float | None) -> None:
    wait_s = bounded_wait_s(seconds)
    assert 0.0 <= wait_s <= MAX_WAIT_S
    with selectors.DefaultSelector() as selector:
        selector.select(0 if wait_s else wait_s)
    if seconds is not None and 0 <= seconds <= MAX_WAIT_S:
        assert wait_s == seconds
