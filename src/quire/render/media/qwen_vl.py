"""Images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: any size, in patches.

An image is resized so that both sides are multiples of patch_size * merge_size and the number of
pixels stays in a range. It becomes patches in the order in which the tower merges them: groups of
merge_size x merge_size patches, row by row. One placeholder token stands for one group.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from PIL import Image

from quire.base.errors import RequestError
from quire.render.media.image_files import Pixels
from quire.render.media.image_ops import resize
from quire.render.media.processor import (
    CLIP_MEAN,
    CLIP_STD,
    ProcessedImage,
    SettledImages,
    read_settings,
)

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class QwenImages(SettledImages):
    """The processor of the Qwen families. Sizes are in pixels."""

    patch_size: int = 14
    temporal_patch_size: int = 2  # frames per patch; an image counts as equal frames
    merge_size: int = 2

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        num_pixels: tuple[int, int] = (56 * 56, 28 * 28 * 1280),
        mean: tuple[float, ...] = CLIP_MEAN,
        std: tuple[float, ...] = CLIP_STD,
        patch_size: int = 14,
    ) -> Self:
        """Return the processor that `preprocessor_config.json` describes.

        num_pixels, mean, std, patch_size: the family's values for absent fields."""
        size = dict(zip(("shortest_edge", "longest_edge"), num_pixels, strict=True))
        size |= config.get("size") or {}
        for edge, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            if config.get(name) is not None:
                size[edge] = config[name]
        settings = read_settings(
            {**config, "size": size}, size=size, crop_size={}, mean=mean, std=std,
            resample=Image.Resampling.BICUBIC,
        )  # fmt: skip
        own = {"patch_size": patch_size, "temporal_patch_size": 2, "merge_size": 2}
        return cls(settings, **own | {name: config[name] for name in own if config.get(name)})

    def process(self, image: Pixels) -> ProcessedImage:
        """Return patches, uint8 [patches, 3, patch_size, patch_size], ordered as above."""
        height, width = image.shape[:2]
        if self.settings.do_resize:
            height, width = self.fitting_size(height, width)
            image = resize(image, height, width, self.settings.resample)
        found = self.cut(image[None], 1)
        return replace(found, pixels=found.pixels[:, :, 0])

    def cut(self, frames: Pixels, depth: int) -> ProcessedImage:
        """Return the patches of frames, uint8 [patches, 3, depth, patch_size, patch_size].

        frames: uint8 [N, H, W, 3]. depth: frames per patch; a divisor of N."""
        patch, merge = self.patch_size, self.merge_size
        height, width = frames.shape[1:3]
        times, rows, columns = grid = len(frames) // depth, height // patch, width // patch
        cut = frames.reshape(
            times, depth, rows // merge, merge, patch, columns // merge, merge, patch, 3
        )
        patches = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3, depth, patch, patch)
        num_tokens = times * rows * columns // merge**2
        return ProcessedImage(np.ascontiguousarray(patches), self.table, grid, num_tokens)

    def fitting_size(
        self,
        height: int,
        width: int,
        num_frames: int = 1,
        depth: int = 1,
        item_name: str = "the image",
    ) -> tuple[int, int]:
        """Return the (height, width) to resize to. Raises RequestError for an extreme aspect ratio.

        num_frames, depth: frames of a video and of a patch, if the limit of pixels covers all
        frames together.
        item_name: the object's name in errors.
        """
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise RequestError(
                f"{item_name} has {width} x {height} pixels; its longer side may be at most"
                f" {MAX_ASPECT_RATIO} times its shorter side. Crop it."
            )
        unit = self.patch_size * self.merge_size
        size = self.settings.size
        min_pixels, max_pixels = size["shortest_edge"], size["longest_edge"]
        rounded = round(height / unit) * unit, round(width / unit) * unit
        total = round(num_frames / depth) * depth * rounded[0] * rounded[1]
        if total > max_pixels:
            shrink = math.sqrt(num_frames * height * width / max_pixels)
            return (
                max(unit, math.floor(height / shrink / unit) * unit),
                max(unit, math.floor(width / shrink / unit) * unit),
            )
        if total < min_pixels:
            grow = math.sqrt(min_pixels / (num_frames * height * width))
            return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return rounded
