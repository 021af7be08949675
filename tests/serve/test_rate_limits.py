"""Token buckets, compared with exact fractions and shared by several processes."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest

from quire.base.clock import FakeClock
from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig
from quire.serve.observers.rate_limits import RateLimits, make_memory

Make = Callable[..., RateLimits]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(12_345.0)


@pytest.fixture
def make(clock: FakeClock) -> Iterator[Make]:
    """Yield make((requests, tokens) of each key); the limits of one test share their memory."""
    fds: list[int] = []

    def limits(*pairs: tuple[int, int]) -> RateLimits:
        if not fds:
            fds.append(make_memory(len(pairs)))
        return RateLimits(pairs, fds[0], clock)

    yield limits
    for fd in fds:
        os.close(fd)


def test_limit_allows_a_burst_of_a_minute_then_an_even_rate(make: Make, clock: FakeClock) -> None:
    limits = make((3, 0))
    assert [limits.admit(0) for _ in range(3)] == [None] * 3
    refused = limits.admit(0)
    assert refused is not None and (refused.kind, refused.limit) == ("requests", 3)
    assert refused.wait_s == pytest.approx(20.0)
    clock.advance(19.99)
    assert limits.admit(0) is not None
    clock.advance(0.01)
    assert limits.admit(0) is None
    assert limits.admit(0) is not None
    clock.advance(3600)
    assert limits.levels(0)["requests"].num_left == 3  # never more than a minute's worth


def test_token_debt_must_be_refilled_first(make: Make, clock: FakeClock) -> None:
    limits = make((0, 600))
    limits.charge(0, 599)
    assert limits.admit(0) is None  # one token is left
    limits.charge(0, 301)
    refused = limits.admit(0)
    assert refused is not None and refused.kind == "tokens"
    assert refused.wait_s == pytest.approx(30.1)  # a debt of 300 and one token, at 10 a second
    assert limits.levels(0)["tokens"].num_left == 0
    limits.charge(0, -301)
    assert limits.admit(0) is None
    assert "requests" not in limits.levels(0)


def test_reserve_takes_all_tokens_or_none(make: Make, clock: FakeClock) -> None:
    limits = make((0, 600), (5, 0))
    assert limits.reserve(0, 400) is None
    refused = limits.reserve(0, 300)
    assert refused is not None and refused.wait_s == pytest.approx(10.0)
    assert limits.levels(0)["tokens"].num_left == 200
    assert limits.reserve(0, 200) is None and limits.admit(0) is not None
    limits.charge(0, -350)  # the response was shorter
    assert limits.reserve(0, 300) is None
    assert limits.reserve(1, 10**9) is None  # no limit


def test_reserving_more_than_a_bucket_needs_a_full_one(make: Make, clock: FakeClock) -> None:
    limits = make((0, 600))
    limits.charge(0, 1)
    refused = limits.reserve(0, 1000)
    assert refused is not None and refused.wait_s == pytest.approx(0.1)
    clock.advance(0.1)
    assert limits.reserve(0, 1000) is None
    refused = limits.admit(0)
    assert refused is not None and refused.wait_s == pytest.approx(40.1)


def test_each_key_has_its_own_buckets(make: Make) -> None:
    limits = make((1, 10), (1, 0), (0, 0))
    limits.charge(0, 1000)
    limits.charge(1, 1000)
    assert limits.admit(0) is not None
    assert limits.admit(1) is None and limits.admit(1) is not None
    assert [limits.admit(2) for _ in range(100)] == [None] * 100 and limits.levels(2) == {}


def test_rejected_request_uses_no_quota(make: Make, clock: FakeClock) -> None:
    limits = make((5, 60))
    limits.charge(0, 61)
    assert [limits.admit(0) is not None for _ in range(9)] == [True] * 9
    assert limits.levels(0)["requests"].num_left == 5


def test_limits_match_a_bucket_of_exact_fractions(make: Make, clock: FakeClock) -> None:
    """Random requests, tokens and pauses; times are multiples of a sixteenth of a second."""
    rng = random.Random(5)
    limits = make((7, 1000))
    rates = (Fraction(7, 60), Fraction(1000, 60))
    level = [Fraction(7), Fraction(1000)]
    num_admitted = 0
    for _ in range(5000):
        sixteenths = rng.choice((0, 0, 1, 5, 40, 200))
        clock.advance(sixteenths / 16)
        for kind, capacity in enumerate((7, 1000)):
            level[kind] = min(
                Fraction(capacity), level[kind] + rates[kind] * Fraction(sixteenths, 16)
            )
        if min(abs(have - 1) for have in level) < Fraction(1, 10**4):
            continue  # rounding decides
        expected = level[0] >= 1 and level[1] >= 1
        assert (limits.admit(0) is None) == expected
        if expected:
            num_admitted += 1
            level[0] -= 1
            used = rng.randrange(400)
            limits.charge(0, used)
            level[1] -= used
    assert num_admitted > 500


ADMITTING = """
import sys
from quire.base.clock import FakeClock
from quire.serve.observers.rate_limits import RateLimits
limits = RateLimits([(1000, 10**6)], int(sys.argv[1]), FakeClock(50.0))
sys.stdin.readline()
found = 0
for _ in range(1500):
    if limits.admit(0) is None:
        found += 1
        limits.charge(0, 7)
print(found)
"""


def test_processes_that_share_memory_share_the_limit() -> None:
    fd = make_memory(1)
    command = [sys.executable, "-c", ADMITTING, str(fd)]
    children = [
        subprocess.Popen(
            command, pass_fds=(fd,), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    counts = [int(child.communicate()[0]) for child in children]
    assert sum(counts) == 1000
    left = RateLimits([(1000, 10**6)], fd, FakeClock(50.0)).levels(0)
    assert (left["requests"].num_left, left["tokens"].num_left) == (0, 10**6 - 7000)
    os.close(fd)


def test_settings_give_the_limits_of_each_key() -> None:
    assert ServerConfig().rate_limits == []
    assert ServerConfig(requests_per_minute=(0,)).rate_limits == []
    assert ServerConfig(requests_per_minute=(5,)).rate_limits == [(5, 0)]
    two = ServerConfig(api_key=("a", "b"), requests_per_minute=(5,), tokens_per_minute=(0, 9))
    assert two.rate_limits == [(5, 0), (5, 9)]
    with pytest.raises(ConfigError, match="tokens_per_minute has 3 numbers for 2 API keys"):
        ServerConfig(api_key=("a", "b"), tokens_per_minute=(1, 2, 3))
    with pytest.raises(ConfigError, match="requests_per_minute must be 0"):
        ServerConfig(requests_per_minute=(-1,))
