"""Runs of the systems: their counts, and refused settings."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.paper.settings import DEFAULT, OPT_13B, Load, Method
from benchmarks.paper.systems import (
    FASTER_TRANSFORMER,
    ORCA_MAX,
    ORCA_ORACLE,
    ORCA_POW2,
    PLAIN,
    QUIRE,
    Options,
    serve,
)
from benchmarks.virtual import branching
from benchmarks.virtual.branching import Float64
from quire.tools.workloads import ALPACA, Lengths, Workload

BEAMS = Method("beams", 4, True)


@pytest.mark.parametrize("system", [ORCA_ORACLE, ORCA_POW2, ORCA_MAX, FASTER_TRANSFORMER])
def test_baselines_refuse_beams_with_uncounted_copies(system: str) -> None:
    with pytest.raises(ValueError, match="4 beams .* use the formula"):
        serve(system, OPT_13B, Load(ALPACA, 1.0, 5.0, BEAMS))


def test_faster_transformer_refuses_host_times() -> None:
    slow = replace(PLAIN, assumed=replace(DEFAULT, step_s=0.02))
    with pytest.raises(ValueError, match="device's times alone"):
        serve(FASTER_TRANSFORMER, OPT_13B, Load(ALPACA, 1.0, 5.0), slow)
    load = Load(ALPACA, 1.0, 5.0)
    fast, delayed = (serve(ORCA_MAX, OPT_13B, load, options) for options in (PLAIN, slow))
    assert delayed.latency_s > fast.latency_s


def test_only_samples_save_blocks_and_no_beam_is_replaced() -> None:
    for method in (Method(), Method("samples", 4)):
        served = serve(QUIRE, OPT_13B, Load(ALPACA, 2.0, 5.0, method))
        assert (served.saved > 0) == (method.num > 1)
        assert served.replaced == 0.0


@pytest.mark.parametrize(("is_shrinking", "expected"), [(True, 0.5), (False, 0.0)])
def test_replaced_beams_are_counted(
    is_shrinking: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one search of two beams, each second candidate is below the first one by a gap. If the gap
    shrinks, the better beam's second candidate replaces the other beam at each step. If it grows,
    no beam is replaced."""
    num_steps = 0

    def candidates(num: int, sureness: float, rng: object) -> Float64:
        nonlocal num_steps
        num_steps += 1
        logprobs = np.full((num, branching.NUM_DRAWN), -1000.0)
        logprobs[:, 0] = -0.1
        logprobs[:, 1] = -0.1 - (1 / num_steps if is_shrinking else num_steps)
        return logprobs

    monkeypatch.setattr(branching, "random_logprobs", candidates)
    same = Workload("", Lengths(20.0, 1e-6, 20, 20), Lengths(50.0, 1e-6, 50, 50))
    served = serve(QUIRE, OPT_13B, Load(same, 0.01, 10.0, Method("beams", 2, True)))
    assert num_steps == 50 and served.replaced == pytest.approx(expected, abs=0.03)


def test_swapped_sequences_are_not_recomputed() -> None:
    same = Workload("", Lengths(600.0, 1e-6, 600, 600), Lengths(400.0, 1e-6, 400, 400))
    load = Load(same, 3.0, 10.0)
    recomputed, swapped = (
        serve(QUIRE, OPT_13B, load, Options(mode=mode, copy_s=1e-3))
        for mode in ("recompute", "swap")
    )
    assert recomputed.num_preemptions > 0 == recomputed.num_swapped
    assert swapped.num_swapped == swapped.num_preemptions > 0
    assert recomputed.num_computed > swapped.num_computed
