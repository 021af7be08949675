"""The model of time: few constants, every archived step within 5 %, committed predictions."""

from dataclasses import fields

import pytest

from benchmarks.gpu import time_model
from benchmarks.gpu.time_model import (
    AIMS_MS,
    CHANGES,
    FUSED,
    MISSED,
    NOW,
    SINGLE,
    TOLERANCE,
    Fitted,
    Model,
    Step,
    errors,
    fit,
    kernels,
    machines,
    predictions,
    shape,
)
from benchmarks.result_files import FOLDER, read


def test_archived_steps_are_predicted_with_four_constants() -> None:
    """One of twenty rows is listed as missed, with its reason."""
    assert len(fields(Fitted)) <= 4
    found = errors(Fitted())
    assert len(found) == 20
    missed = {row.name for row, error in found.items() if abs(error) > TOLERANCE}
    assert missed == MISSED.keys() == {"0.6B prompt of 512"}


def test_constants_are_a_best_fit() -> None:
    """A fit from another starting point is hardly better than the constants in use."""

    def worst(fitted: Fitted) -> float:
        return max(abs(e) for row, e in errors(fitted).items() if row.name not in MISSED)

    again = fit(Fitted(latency_us=1.6, tile_us=1.5, wide_share=0.95, host_us=1300.0))
    assert worst(Fitted()) <= worst(again) + 0.005


def test_attention_timed_alone_is_predicted_without_a_fit() -> None:
    """No constant was fitted to attention. The longest single rows are split less evenly than
    assumed."""
    alone = {name: after / us - 1 for name, us, after in kernels() if "attention" in name}
    assert len(alone) == 16
    assert all(abs(error) < 0.1 for name, error in alone.items() if "16384" not in name)


def test_launches_per_layer_follow_the_program() -> None:
    """Keys of one row are split over programs, so its merge remains; those of 64 rows are not."""
    model, gpu = shape("llama-3.1-8b"), machines()[SINGLE]
    counts = [
        [Model(model, gpu, program).launches(step) for step in (Step(1, 512), Step(64, 512))]
        for program in (NOW, FUSED)
    ]
    assert counts == [[10, 10], [7, 9]]


def test_predictions_are_committed_and_follow_from_the_model() -> None:
    result = read(FOLDER / "virtual-time" / "gpu_time_model.json")
    made = list(predictions())
    assert len(made) == len(AIMS_MS) * len(CHANGES) and len(result.rows) == len(made)
    for old, new in zip(result.rows, made, strict=True):
        numbers = [name for name, value in new.items() if isinstance(value, float)]
        assert [old[name] for name in numbers] == pytest.approx([new[name] for name in numbers])
        assert (old["case"], old["change"]) == (new["case"], new["change"])
    settings = {item.name: result.settings[item.name] for item in fields(time_model.Fitted)}
    assert Fitted(**settings) == Fitted()
