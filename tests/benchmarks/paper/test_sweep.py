"""The search for a sustained rate, against a system whose queue follows from its rates."""

import pytest

from benchmarks.paper import sweep as module
from benchmarks.paper.figure import Curve, Effort, Rates
from benchmarks.paper.settings import OPT_13B, Load, Method, Setting
from benchmarks.paper.sweep import LIMIT_S, Sweep, sweep
from benchmarks.paper.systems import Options, Served, throughput
from quire.tools.simulate.run import Run
from quire.tools.simulate.served import Ledger
from quire.tools.simulate.served import Served as Finished
from quire.tools.workloads import SHAREGPT, Lengths, Workload

CAPACITY, OUTPUT, LATENCY_S = 1.9, 80.0, 0.03


def served(system: str, setting: Setting, load: Load, options: Options) -> Served:
    """Serve up to CAPACITY. The excess waits for half of the queue's growth on average."""
    excess_s = max(0.0, load.rate_per_s / CAPACITY - 1) * load.seconds / 2
    return Served(
        system,
        load.rate_per_s,
        LATENCY_S + excess_s / OUTPUT,
        batched=1.0,
        tokens_per_s=1.0,
        memory={},
        throughput=min(load.rate_per_s, CAPACITY),
        offered=load.rate_per_s,
    )


def point(rate: float, latency_s: float, throughput: float = 1.0) -> Served:
    return Served("any", rate, latency_s, 1.0, 1.0, {}, throughput=throughput)


@pytest.mark.parametrize("first", [0.1, 1.5, 40.0])
@pytest.mark.parametrize("seconds", [60.0, 3600.0])
def test_short_and_long_traces_give_the_same_rate(
    seconds: float, first: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "serve", served)
    found = sweep("any", OPT_13B, Load(SHAREGPT, first, 0.0), Effort(seconds, 1, True))
    assert found.sustained == pytest.approx(CAPACITY, rel=0.03)
    rates = [each.rate_per_s for each in found.points]
    assert rates == sorted(rates) and rates[0] < CAPACITY < rates[-1] <= max(4 * CAPACITY, first)


def test_latency_alone_overestimates_the_rate_of_short_traces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "serve", served)
    load = Load(SHAREGPT, 1.5, 0.0)
    short, long = (
        sweep("any", OPT_13B, load, Effort(seconds, 4, False)) for seconds in (60.0, 3600.0)
    )
    assert short.crossing() is None or short.crossing() > 1.2 * CAPACITY
    assert long.crossing() == pytest.approx(CAPACITY, rel=0.05)


def test_lower_of_both_rates_is_sustained() -> None:
    points = [point(1.0, 0.1), point(2.0, 0.2, 1.9), point(4.0, 0.4, 1.8)]
    found = Sweep("any", points)
    assert found.rates == Rates("any", None, 1.8) and found.sustained == 1.8
    found = Sweep("any", [*points, point(8.0, 0.8, 9.0)])
    assert found.rates.crossing == pytest.approx(5.0) and found.sustained == found.crossing()


def test_plot_ends_with_the_first_point_beyond_the_limit() -> None:
    points = [point(1.0, 0.1), point(2.0, 1.5), point(3.0, 4.0), point(4.0, 9.0)]
    assert Sweep("any", points).curve == Curve("any", [1.0, 2.0], [0.1, 1.5])
    assert Sweep("any", points[:1]).curve.x == [1.0]


def test_latency_may_limit_the_rate_below_the_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(system: str, setting: Setting, load: Load, options: Options) -> Served:
        rate = load.rate_per_s
        return Served(system, rate, rate, 1.0, 1.0, {}, throughput=rate, offered=rate)

    monkeypatch.setattr(module, "serve", slow)
    found = sweep("any", OPT_13B, Load(SHAREGPT, 0.4, 0.0), Effort(60.0, 1, False))
    assert found.sustained == pytest.approx(LIMIT_S)
    assert found.crossing(0.45) == pytest.approx(0.45)


def test_system_that_serves_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(system: str, setting: Setting, load: Load, options: Options) -> Served:
        return Served(system, load.rate_per_s, 9.0, 0.0, 0.0, {}, throughput=0.0, offered=1.0)

    monkeypatch.setattr(module, "serve", stuck)
    with pytest.raises(ValueError, match="no rate near 1.5"):
        sweep("any", OPT_13B, Load(SHAREGPT, 1.5, 0.0), Effort(60.0, 1, False))


def test_throughput_counts_only_while_a_system_is_full() -> None:
    """A request has two answers of 10 tokens, so 40 tokens are 2 requests in 5 s. With a later
    admission, 140 tokens are 7 requests in 10 s."""
    workload = Workload("", Lengths(4.0, 1e-6, 4, 4), Lengths(10.0, 1e-6, 10, 10))
    load = Load(workload, 1.0, 10.0, Method("samples", 2))
    ledger = Ledger(0, {})
    ledger.tokens = [(1.0, 100), (5.0, 100), (5.1, 30), (10.0, 10), (10.1, 100), (15.1, 100)]
    served = {"0": Finished(0.0, admitted_s=3.0)}
    assert throughput(Run(served, [ledger]), load) == pytest.approx(2 / 5)
    served["1"] = Finished(0.0, admitted_s=15.0)
    assert throughput(Run(served, [ledger]), load) == pytest.approx(7 / 10)
