"""A fit finds the coefficients that generated the durations, even with disturbed steps."""

from pathlib import Path

import numpy as np
import pytest

from quire.base.errors import ConfigError
from quire.base.plan import Move, MoveKind, Plan, RowStart
from quire.base.requests.sampling_params import SamplingParams
from quire.tools.step_fitting import (
    FEATURES,
    IDLE_S,
    Fitted,
    Measured,
    fit_steps,
    lines_of,
    non_negative,
    read_fitted,
    write_fitted,
)

KNOWN = {
    "fixed": 2e-3,
    "tokens": 1e-4,
    "tokens beyond 64": 3e-4,
    "context": 5e-7,
    "prompt x context": 2e-8,
    "rows that begin": 2e-4,
    "rows that sample": 4e-5,
    "blocks moved": 1e-4,
}


def start(row: int) -> RowStart:
    return RowStart(row, np.zeros(1, np.int32), 0, 1, SamplingParams(), 0)


def host_s(plan: Plan) -> float:
    return 1e-3 + 2e-5 * len(plan.rows) + 7e-5 * len(plan.started)


def plans(num: int, seed: int) -> list[Plan]:
    rng = np.random.default_rng(seed)
    made = []
    for step in range(num):
        rows = np.arange(rng.integers(1, 40), dtype=np.int32)
        num_tokens = np.ones(len(rows), np.int32)
        if step % 2:
            num_tokens[0] = rng.integers(2, 500)
        computed = rng.integers(0, 3000, len(rows)).astype(np.int32)
        blocks = np.arange(rng.integers(0, 9), dtype=np.int32)
        moves = (Move(MoveKind.LOAD, 0, blocks, blocks),) if len(blocks) else ()
        sampling = rows[: rng.integers(0, len(rows) + 1)]
        started = tuple(start(row) for row in rows[: rng.integers(0, 4)].tolist())
        made.append(Plan(step, rows, num_tokens, computed, sampling, moves=moves, started=started))
    return made


def test_known_coefficients_are_found() -> None:
    truth = Fitted(KNOWN)
    steps = [Measured(plan, truth.seconds(plan), host_s(plan)) for plan in plans(300, 0)]
    fresh = [plan for plan in plans(400, 4) if len(plan.started) == len(plan.rows)]
    cold = [Measured(plan, 1.6 * truth.seconds(plan), 0.1, IDLE_S) for plan in fresh]
    found = fit_steps([*cold, *steps], copy_bytes_per_s=5.0)
    for name in FEATURES:
        assert found.step[name] == pytest.approx(KNOWN.get(name, 0.0), rel=1e-4, abs=1e-9), name
    assert found.host_s == pytest.approx(1e-3, rel=1e-3)
    assert found.host_row_s == pytest.approx(2e-5, rel=1e-3)
    assert found.host_begin_s == pytest.approx(7e-5, rel=1e-3)
    assert found.cold == pytest.approx(1.6, rel=1e-3)
    assert found.residuals is not None and found.residuals.p90 < 1e-4
    for plan, idle_s, factor in (
        (fresh[0], IDLE_S / 2, 1.0), (fresh[0], 2 * IDLE_S, 1.6), (plans(1, 7)[0], 2 * IDLE_S, 1.0)
    ):  # fmt: skip
        ends_s, duration_s = found.carry_out(plan, 10.0, idle_s)
        assert duration_s == pytest.approx(factor * truth.seconds(plan), rel=1e-3)
        host_time_s = ends_s - 10.0 - duration_s
        assert host_time_s == pytest.approx(factor * (host_s(plan) - 1e-3), rel=1e-3)
    assert found.plans_s(3, 10.0) == pytest.approx(10.001)


def test_total_time_is_right_despite_slow_steps() -> None:
    """Frequent small delays count; a rare large one does not."""
    truth = Fitted({"fixed": 1e-3, "tokens": 1e-5})
    factors = [1.0, 1.0, 1.0, 1.4] * 50 + [30.0]
    made = plans(len(factors), 5)
    steps = [Measured(p, f * truth.seconds(p)) for p, f in zip(made, factors, strict=True)]
    found = fit_steps(steps)
    total = sum(found.seconds(plan) for plan in made[:-1])
    assert total == pytest.approx(sum(step.duration_s for step in steps[:-1]), rel=0.01)


def test_disturbed_steps_change_little() -> None:
    truth, rng = Fitted(KNOWN), np.random.default_rng(1)
    factors = np.where(rng.random(400) < 0.1, 4.0, rng.normal(1, 0.02, 400))
    steps = [
        Measured(plan, truth.seconds(plan) * float(factor))
        for plan, factor in zip(plans(400, 2), factors, strict=True)
    ]
    found = fit_steps(steps)
    for plan in plans(50, 3):
        assert found.seconds(plan) == pytest.approx(truth.seconds(plan), rel=0.05)
    assert found.host_s == 0.0


def test_no_coefficient_is_negative() -> None:
    inputs = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative(inputs, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert non_negative(inputs, np.array([1.0, 3.0, 5.0])) == pytest.approx([0.0, 22 / 14])


def test_fit_is_written_and_read(tmp_path: Path) -> None:
    path, fitted = tmp_path / "fit.json", Fitted(KNOWN, 1e-3, 2e-5, 3e-5, 1.5, 5.0, "m", "d")
    write_fitted(path, fitted)
    assert read_fitted(path) == fitted
    assert any("blocks moved" in line for line in lines_of(fitted))


def test_invalid_fits_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    for text, message in (
        ("{", "cannot be read"),
        ("{}", "holds no step times"),
        ('{"kind": "quire step times", "step": {"speed": 1}}', "by fixed, tokens"),
        ('{"kind": "quire step times", "step": {"fixed": -1}}', "numbers from 0"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_fitted(path)
    with pytest.raises(ConfigError, match="too few"):
        fit_steps([Measured(plan, 1.0) for plan in plans(5, 0)])
