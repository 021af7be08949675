"""Positions for M-RoPE against transformers' `get_rope_index`, for random prompts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from quire.models.vision.positions import Grid, frame_interval, frames_of, mrope_positions

MODELS: dict[str, Any] = {
    "qwen2_vl": Qwen2VLModel,
    "qwen2_5_vl": Qwen2_5_VLModel,
    "qwen3_vl": Qwen3VLModel,
}
TOKENS_PER_SECOND = 25
TEXT, IMAGE, VIDEO = 0, 1, 2


class Prompt:
    """A random mix of text, images and videos, as quire and transformers describe it."""

    def __init__(self, family: str, merge: int, random: np.random.Generator) -> None:
        self.kinds: list[int] = []
        self.images: list[tuple[int, Grid]] = []
        self.intervals: list[float] = []
        self.grids: dict[int, list[Grid]] = {IMAGE: [], VIDEO: []}
        self.seconds: list[float] = []
        for _ in range(random.integers(0, 5)):
            self._add_text(random)
            rows, columns = (random.integers(1, 5, 2) * merge).tolist()
            if random.random() < 0.5:
                self._add(IMAGE, (1, rows, columns), merge, 1.0)
                self.grids[IMAGE].append((1, rows, columns))
                continue
            grid = (int(random.integers(1, 6)), rows, columns)
            self.grids[VIDEO].append(grid)
            if family == "qwen3_vl":
                starts = []
                for _ in range(grid[0]):
                    self._add_text(random)
                    starts.append(len(self.kinds))
                    self.kinds += [VIDEO] * (rows * columns // merge**2)
                self.images += frames_of(starts, grid)
                self.intervals += [1.0] * grid[0]
                continue
            self.seconds.append(float(random.random() * 3))
            scaled = frame_interval(TOKENS_PER_SECOND, self.seconds[-1])
            self._add(VIDEO, grid, merge, scaled if family == "qwen2_5_vl" else 1.0)
        if random.random() < 0.7 or not self.kinds:
            self._add_text(random)

    def _add_text(self, random: np.random.Generator) -> None:
        self.kinds += [TEXT] * int(random.integers(1, 7))

    def _add(self, kind: int, grid: Grid, merge: int, interval: float) -> None:
        self.images.append((len(self.kinds), grid))
        self.intervals.append(interval)
        self.kinds += [kind] * (int(np.prod(grid)) // merge**2)

    def reference(self, family: str, merge: int) -> tuple[np.ndarray, int]:
        """Return transformers' positions and delta."""
        kind = MODELS[family]
        vision = SimpleNamespace(spatial_merge_size=merge, tokens_per_second=TOKENS_PER_SECOND)
        model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
        model.get_vision_position_ids = lambda *args, **names: kind.get_vision_position_ids(
            model, *args, **names
        )
        grids = [torch.tensor(self.grids[each]) if self.grids[each] else None
                 for each in (IMAGE, VIDEO)]  # fmt: skip
        seconds = {"second_per_grid_ts": torch.tensor(self.seconds)} if self.seconds else {}
        kinds = torch.tensor([self.kinds])
        positions, deltas = kind.get_rope_index(
            model, torch.zeros_like(kinds), kinds, *grids, **seconds
        )
        return positions[:, 0].numpy(), int(deltas)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("merge", [1, 2])
def test_positions_match_transformers(family: str, merge: int) -> None:
    random = np.random.default_rng(merge)
    lags = set()
    for _ in range(25):
        prompt = Prompt(family, merge, random)
        got, delta = mrope_positions(len(prompt.kinds), prompt.images, merge, prompt.intervals)
        wanted, wanted_delta = prompt.reference(family, merge)
        assert got.dtype == np.int64
        np.testing.assert_array_equal(got, wanted)
        assert delta == wanted_delta
        lags.add(delta)
    assert len(lags) > 5, "the prompts vary too little"


def test_positions_of_text_are_its_indices() -> None:
    positions, delta = mrope_positions(5, [], 2)
    assert positions.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


def test_text_continues_after_the_larger_side_of_an_image() -> None:
    positions, delta = mrope_positions(9, [(2, (1, 4, 6))], 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    assert delta == -3


def test_misplaced_images_fail_an_assertion() -> None:
    with pytest.raises(AssertionError, match="order of the prompt"):
        mrope_positions(9, [(4, (1, 2, 2)), (2, (1, 2, 2))], 2)
    with pytest.raises(AssertionError, match="all tokens of an image"):
        mrope_positions(4, [(2, (1, 4, 6))], 2)
