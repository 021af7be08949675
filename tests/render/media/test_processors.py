"""Images are preprocessed exactly as by transformers' PIL processors, bit for bit."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.modeling_llava_next import (
    get_anyres_image_grid_shape,
    unpad_image,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.base.errors import ModelError
from quire.render.media.gemma3 import GemmaImages
from quire.render.media.llava import LlavaImages, LlavaNextImages
from quire.render.media.model_files import ModelFiles
from quire.render.media.processor import ProcessedImage
from quire.render.media.processors import image_processor, media_settings
from quire.render.media.qwen_vl import QwenImages

SIZES = [(64, 64), (1, 1), (37, 211), (211, 37), (500, 333), (3, 590), (1023, 769), (29, 30)]


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return a smooth picture with noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width]
    base = np.stack([x * 255 // max(1, width), y * 255 // max(1, height), (x + y) % 256], -1)
    noise = random.integers(-20, 20, base.shape)
    return Image.fromarray(np.clip(base + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def channels_first(processed: ProcessedImage) -> np.ndarray:
    """Return squares as the tower reads them, float32 [N, 3, H, W]."""
    looked_up = [processed.table[c][processed.pixels[..., c]] for c in range(3)]
    return np.stack(looked_up, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "config",
    [{}, {"min_pixels": 784, "max_pixels": 28 * 28 * 40},
     {"patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 500_000},
      "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}],
)  # fmt: skip
def test_qwen_patches_equal_those_of_transformers(
    size: tuple[int, int], config: dict[str, Any]
) -> None:
    image = picture(*size)
    theirs = Qwen2VLImageProcessorPil(**config)(images=[image], return_tensors="np")
    ours = QwenImages.from_config(config).process(np.asarray(image))
    patches = np.stack([ours.table[c][ours.pixels[:, c]] for c in range(3)], 1)
    twice = np.repeat(patches[:, :, None], 2, 2).reshape(len(patches), -1)
    assert ours.grid == tuple(theirs["image_grid_thw"][0])
    np.testing.assert_array_equal(twice, theirs["pixel_values"])
    assert ours.num_tokens == len(patches) // 4


@pytest.mark.parametrize("size", [*SIZES, (1200, 300), (300, 1300)])
@pytest.mark.parametrize("scans", [False, True])
def test_gemma_pixels_equal_those_of_transformers(size: tuple[int, int], scans: bool) -> None:
    config = {
        "size": {"height": 56, "width": 56}, "image_seq_length": 4, "do_pan_and_scan": scans,
        "pan_and_scan_min_crop_size": 128, "pan_and_scan_max_num_crops": 3,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }  # fmt: skip
    image = picture(*size)
    theirs = Gemma3ImageProcessorPil(**config)(images=[image], return_tensors="np")
    ours = GemmaImages.from_config(config).process(np.asarray(image))
    np.testing.assert_array_equal(channels_first(ours), theirs["pixel_values"])
    assert ours.num_tokens == 4 * (1 + int(theirs["num_crops"][0]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "config",
    [{}, {"do_pad": True},
     {"size": {"shortest_edge": 40}, "crop_size": {"height": 57, "width": 41}},
     {"size": {"height": 30, "width": 31}, "do_center_crop": False, "do_rescale": False}],
)  # fmt: skip
def test_llava_pixels_equal_those_of_transformers(
    size: tuple[int, int], config: dict[str, Any]
) -> None:
    if size == (3, 590) and "size" not in config:
        size = (30, 59)
    image = picture(*size)
    theirs = LlavaImageProcessorPil(**config)(images=[image], return_tensors="np")
    ours = LlavaImages.from_config(config, 14, 0).process(np.asarray(image))
    np.testing.assert_array_equal(channels_first(ours), theirs["pixel_values"])


@pytest.mark.parametrize("size", [s for s in SIZES if s != (3, 590)])
@pytest.mark.parametrize("grids", [[[56, 112], [112, 56], [112, 112]], [[56, 168], [168, 56]]])
def test_llava_next_pixels_equal_those_of_transformers(
    size: tuple[int, int], grids: list[list[int]]
) -> None:
    config = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
              "image_grid_pinpoints": grids}  # fmt: skip
    image = picture(*size)
    theirs = LlavaNextImageProcessorPil(**config)(images=[image], return_tensors="np")
    ours = LlavaNextImages.from_config(config, 14, 0).process(np.asarray(image))
    np.testing.assert_array_equal(channels_first(ours), theirs["pixel_values"][0])
    down, across = get_anyres_image_grid_shape(size[::-1], grids, 56)
    kept = unpad_image(torch.empty(1, 4 * down, 4 * across), size[::-1]).shape[1:]
    assert ours.grid == (down, across, *kept)
    assert ours.num_tokens == 16 + kept[0] * (kept[1] + 1)


@pytest.mark.parametrize(
    ("model_type", "family"),
    [("qwen2_vl", QwenImages), ("qwen2_5_vl", QwenImages), ("qwen3_vl", QwenImages),
     ("qwen3_vl_moe", QwenImages), ("gemma3", GemmaImages), ("llava", LlavaImages),
     ("llava_next", LlavaNextImages)],
)  # fmt: skip
def test_each_model_type_has_the_processor_of_its_family(model_type: str, family: type) -> None:
    settings = media_settings(ModelFiles({"model_type": model_type}, {"image_mean": [0, 0, 0]}))
    processor = image_processor(settings)
    assert type(processor) is family
    np.testing.assert_array_equal(processor.table[:, 0], 0)


def test_other_model_types_are_rejected_by_name() -> None:
    with pytest.raises(ModelError, match="'mllama'.*llava_next"):
        media_settings(ModelFiles({"model_type": "mllama"}))


@pytest.mark.parametrize(
    ("model", "processor", "expected"),
    [({}, {}, (14, 0)),
     ({"vision_feature_select_strategy": "full"}, {}, (14, 1)),
     ({"vision_config": {"model_type": "siglip_vision_model", "patch_size": 16},
       "vision_feature_select_strategy": "full"}, {}, (16, 0)),
     ({}, {"patch_size": 8, "num_additional_image_tokens": 1,
           "vision_feature_select_strategy": "default"}, (8, 0))],
)  # fmt: skip
def test_llava_counts_the_class_token(
    model: dict[str, Any], processor: dict[str, Any], expected: tuple[int, int]
) -> None:
    settings = media_settings(ModelFiles({"model_type": "llava", **model}, {}, processor))
    assert (settings.patch_size, settings.num_extra_tokens) == expected
