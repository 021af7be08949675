"""The formula of full systems: batches from memory, rates from steps, and host time."""

from dataclasses import replace

import pytest

from benchmarks.paper.capacity import Capacity, gain, needed_step_s
from benchmarks.paper.settings import DEFAULT, MAX_LEN, OPT_13B, Load, Method
from benchmarks.paper.systems import ORCA_MAX, ORCA_ORACLE, QUIRE, serve
from quire.tools.workloads import SHAREGPT, Lengths, Workload

SAME = Workload("all the same", Lengths(100.0, 1e-6, 100, 100), Lengths(28.0, 1e-6, 28, 28))


def test_batches_follow_from_memory() -> None:
    """128 tokens fill one chunk. A sequence has 100 + 14 tokens and 7.5 empty slots on average."""
    slots = OPT_13B.num_slots
    assert Capacity(ORCA_ORACLE, OPT_13B, SAME).num_sequences == slots / 128
    assert Capacity(ORCA_MAX, OPT_13B, SAME).num_sequences == slots // MAX_LEN
    ours = Capacity(QUIRE, OPT_13B, SAME)
    assert ours.num_sequences == pytest.approx(0.99 * slots / 121.5)
    shared = replace(ours, saved=0.5, method=Method("beams", 2, True))
    assert shared.num_sequences == pytest.approx(2 * ours.num_sequences)


def test_rate_is_the_batch_divided_by_the_answer_time() -> None:
    found = Capacity(ORCA_MAX, OPT_13B, SAME)
    assert found.rate == pytest.approx(7 / (28 * found.step_s(7)))


def test_beam_copies_slow_only_orca() -> None:
    beams = Method("beams", 6, True)
    none = replace(DEFAULT, replaced=0.0)
    some = Capacity(ORCA_ORACLE, OPT_13B, SAME, beams)
    assert some.step_s(6) > replace(some, assumed=none).step_s(6)
    ours = Capacity(QUIRE, OPT_13B, SAME, beams)
    assert ours.step_s(6) == replace(ours, assumed=none).step_s(6)


def test_needed_step_time_gives_the_requested_gain() -> None:
    ours = Capacity(QUIRE, OPT_13B, SHAREGPT)
    needed = needed_step_s(ours, ORCA_MAX, 4.0)
    assert needed is not None
    changed = replace(ours, assumed=replace(DEFAULT, step_s=needed))
    assert gain(changed, ORCA_MAX) == pytest.approx(4.0, rel=1e-3)
    batches = ours.num_sequences / 7
    assert needed_step_s(ours, ORCA_MAX, 1.01 * batches) is None
    assert needed_step_s(ours, ORCA_MAX, 1.0) == 0.0


def test_formula_agrees_with_a_full_simulation() -> None:
    """Orca (Max) runs at three times its limit."""
    served = serve(ORCA_MAX, OPT_13B, Load(SHAREGPT, 2.0, 150.0))
    rate = served.tokens_per_s / SHAREGPT.outputs.mean
    assert rate == pytest.approx(Capacity(ORCA_MAX, OPT_13B, SHAREGPT).rate, rel=0.2)
