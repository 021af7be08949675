"""The benchmark of images: its limits, and a run with a fake engine, from calls to the table."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.cpu.drivers.imaging import emit, measure
from benchmarks.cpu.engines import FLOAT16, OPENVINO, Engine
from benchmarks.cpu.images.checkpoint import SPECIAL, config_of, special_id
from benchmarks.cpu.images.limits import TowerWork, min_times
from benchmarks.cpu.images.report import agreement, summary, tower_lines
from benchmarks.cpu.images.workload import (
    QWEN3_VL_2B,
    TINY_VL,
    TOWER_ALONE,
    WORKLOADS,
    chosen_workload,
    random_pixels,
)
from benchmarks.cpu.limits import Ceilings
from benchmarks.cpu.processes import Run

# 59 GB/s, 472 * 10^9 operations per second in floats, 944 in 8 bits.
CEILINGS = Ceilings(59e9, 472e9, 236e9, 944e9)
OURS = Engine("quire bf16", "16-bit", "", FLOAT16)
REFERENCE = Engine("transformers bf16", "16-bit", "", FLOAT16, OPENVINO)


@dataclass
class FakeModel:
    """An engine whose answers are the first bytes of the images."""

    calls: list[list[Any]] = field(default_factory=list)

    def picture(self, pixels: bytes, side: int) -> Any:
        assert len(pixels) == 3 * side * side
        return pixels

    def first_texts(self, pictures: list[Any]) -> list[str]:
        self.calls.append(pictures)
        return [str(picture[0]) for picture in pictures]


def test_tower_work_equals_the_count_of_torch() -> None:
    """torch's FlopCounterMode counts 234,881,024 for transformers' tower, with both frames."""
    work = TowerWork.of(TINY_VL, 256)
    second_frame = 2 * 256 * 3 * 16 * 16 * TINY_VL.tower.width
    assert work.products + work.attention + second_frame == 234_881_024


def test_limits_equal_values_computed_by_hand() -> None:
    tower = TowerWork.of(QWEN3_VL_2B, 1024)
    assert tower.lower_bound_s(CEILINGS) == pytest.approx(9.19, rel=0.01)
    first, stream = WORKLOADS
    assert first.prompt_len == 1024 + 64
    # 1.41e9 weights of layers for 1,088 tokens, a head for one, attention.
    assert min_times(first, CEILINGS)["image_ttft_s"] == pytest.approx(9.19 + 6.79, rel=0.01)
    assert 1 / min_times(stream, CEILINGS)["images_rate"] == pytest.approx(9.4, rel=0.01)


def test_shapes_have_image_ids_and_the_same_tower() -> None:
    assert TOWER_ALONE.tower == QWEN3_VL_2B.tower
    config = config_of(QWEN3_VL_2B)
    assert config["image_token_id"] == special_id(QWEN3_VL_2B, "<|image_pad|>") == 151_934
    assert special_id(QWEN3_VL_2B, SPECIAL[-1]) == config["text_config"]["vocab_size"] - 1


def test_images_differ_within_a_call_and_follow_the_seed() -> None:
    model, workload = FakeModel(), chosen_workload("stream", is_small=True)
    for seed in (1, 1, 2):
        measure(model, workload, seed)
    first, again, other = model.calls
    assert first == again
    assert len({*first, *other}) == 2 * workload.together


def test_run_becomes_a_row_with_the_share_of_the_tower(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workload = chosen_workload("stream", is_small=False)
    runs, texts = [], {}
    for engine, seconds, answers in (
        (OURS, 10.0 * workload.together, ["a", "b", "c", "d"]),
        (REFERENCE, 20.0 * workload.together, ["a", "b", "c", "e"]),
    ):
        emit(workload, seconds, 0.0, answers)
        line = json.loads(capsys.readouterr().out)
        runs.append(Run(engine.name, line["workload"], 0, line["metrics"], line["others"]))
        texts[engine.name, workload.name, 0] = line["texts"]
    found = summary(runs, [OURS, REFERENCE], CEILINGS, is_small=False)
    entry = found[OURS.name]["images_rate"]
    assert entry["best"] == pytest.approx(0.1)
    assert entry["tower_share"] == pytest.approx(0.919, rel=0.01)
    assert entry["share"] > entry["tower_share"]
    assert "92% of the tower's limit" in tower_lines(found, CEILINGS, is_small=False)[1]
    assert agreement(texts, OURS.name) == "3 of 4"


def test_images_have_squares_of_one_colour() -> None:
    pixels = random_pixels(8, seed=0)
    rows = [pixels[start : start + 24] for start in range(0, len(pixels), 24)]
    assert rows[0] == rows[1] != rows[2]
    assert rows[0][:3] == rows[0][3:6] != rows[0][6:9]
