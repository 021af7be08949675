"""The accuracy benchmark: its statistics by hand, its held-out material, and a small run."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import accuracy
from benchmarks.models.accuracy_statistics import LogitError, PairedAccuracy, mean_and_error
from benchmarks.result_files import read
from quire.ops.host.native import core


def log_softmax(*logits: list[float]) -> np.ndarray:
    exact = np.array(logits)
    return (exact - np.log(np.exp(exact).sum(-1, keepdims=True))).astype(np.float32)


def pairs(both: int, lost: int, gained: int, neither: int) -> PairedAccuracy:
    before = [True] * (both + lost) + [False] * (gained + neither)
    after = [True] * both + [False] * lost + [True] * gained + [False] * neither
    keys = [str(index) for index in range(len(before))]
    return PairedAccuracy.of(np.array(before), np.array(after), keys)


def test_paired_accuracy_has_counts_interval_and_p_value() -> None:
    """Even equal answers have an interval, since a difference remains possible."""
    found = pairs(90, 6, 2, 2)
    assert (found.num_right, found.lost, found.gained, found.num_items) == (92, 6, 2, 100)
    assert found.points == pytest.approx(-4.0)
    assert found.p_value == pytest.approx(2 * (1 + 8 + 28) / 2**8)
    low, high = found.interval
    assert low < -4 < high
    assert (high - low) / 2 == pytest.approx(
        100 * 1.959964 * math.sqrt((9 / 102 - (4 / 102) ** 2) / 102), rel=1e-6
    )
    found = pairs(2000, 0, 0, 0)
    low, high = found.interval
    assert found.points == 0 and found.p_value == 1
    assert low == -high and 0 < high < 0.15


def test_items_with_the_same_key_count_once() -> None:
    before = np.ones(1000, bool)
    after = np.arange(1000) >= 40
    intervals = []
    for size in (1, 20):
        keys = [str(index // size) for index in range(1000)]
        low, high = PairedAccuracy.of(before, after, keys).interval
        intervals.append(high - low)
    assert intervals[1] / intervals[0] == pytest.approx(math.sqrt(20), rel=0.05)


def test_mean_is_over_tokens_and_its_error_over_texts() -> None:
    assert mean_and_error([np.zeros(3), np.ones(1)])[0] == pytest.approx(0.25)
    values = np.random.default_rng(0).normal(size=40)
    mean, error = mean_and_error([np.full(50, value) for value in values])
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / math.sqrt(40))


def test_logit_errors_are_computed_by_hand() -> None:
    error, two = LogitError(), math.log(2)
    error.add(log_softmax([two, 0.0], [0.0, 1.0]), log_softmax([0.0, 0.0], [3.0, 4.0]))
    divergence = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    expected = {
        "mean_absolute": two / 4,
        "largest_absolute": two / 2,
        "relative": math.sqrt(two**2 / 2 / (two**2 / 2 + 1 / 2)),
        "largest_divergence": divergence,
        "divergence": divergence / 2,
        "same_best_token": 1.0,
    }
    found = error.figures()
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    error.add(log_softmax([0.0, 1.0]), log_softmax([1.0, 0.0]))
    assert error.figures()["same_best_token"] == pytest.approx(2 / 3)


@pytest.mark.slow
@pytest.mark.skipif(core() is None, reason="the C++ core is not built")
def test_small_run_writes_consistent_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "accuracy.json"
    arguments = "--items 2 --kinds addition --formats int8 --text-tokens 100 --positions 30"
    monkeypatch.setattr(sys, "argv", ["accuracy", *arguments.split(), "--output-json", str(path)])
    accuracy.main()
    rows = read(path).rows
    compared = [(row["format"], row["against"]) for row in rows]
    assert compared == [
        ("float32", "float32"), ("bfloat16", "float32"), ("int8", "bfloat16"), ("int8", "float32")
    ]  # fmt: skip
    errors = [row["logits.relative"] for row in rows]
    assert errors[0] == 0 < errors[1] < errors[3] < 0.1
    for row in rows:
        assert row["logits.positions"] >= 30
        assert abs(row["text.all.difference"]) < 0.05
        assert row["tasks.all.items"] == 2
    assert "int8 against bfloat16: " in capsys.readouterr().out
