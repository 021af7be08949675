"""Images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: any size, in patches.

An image is resized so that both sides are multiples of patch_size * merge_size and the number of
pixels stays in a range. It becomes patches in the order in which the tower merges them: groups of
merge_size x merge_size patches, row by row. One placeholder token stands for one group.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from PIL import Image

from quire.base.errors import RequestError
from quire.render.media.image_files import Pixels
from quire.render.media.image_ops import Float32, resize
from quire.render.media.processor import (
    CLIP_MEAN,
    CLIP_STD,
    ImageSettings,
    ProcessedImage,
    read_settings,
)

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class QwenImages:
    """The processor of the Qwen families. Sizes are in pixels."""

    settings: ImageSettings
    patch_size: int = 14
    temporal_patch_size: int = 2  # frames per patch; an image counts as equal frames
    merge_size: int = 2

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the processor that `preprocessor_config.json` describes."""
        size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
        size |= config.get("size") or {}
        for edge, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
            if config.get(name) is not None:
                size[edge] = config[name]
        settings = read_settings(
            {**config, "size": size}, size=size, crop_size={}, mean=CLIP_MEAN, std=CLIP_STD,
            resample=Image.Resampling.BICUBIC,
        )  # fmt: skip
        own = ("patch_size", "temporal_patch_size", "merge_size")
        return cls(settings, **{name: config[name] for name in own if config.get(name)})

    @property
    def table(self) -> Float32:
        """Return the value table of the settings."""
        return self.settings.table

    def process(self, image: Pixels) -> ProcessedImage:
        """Return patches, uint8 [patches, 3, patch_size, patch_size]; see the module's header."""
        settings, patch, merge = self.settings, self.patch_size, self.merge_size
        height, width = image.shape[:2]
        if settings.do_resize:
            height, width = self.fitting_size(height, width)
            image = resize(image, height, width, settings.resample)
        rows, columns = height // patch, width // patch
        cut = image.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
        patches = cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)
        num_tokens = rows * columns // merge**2
        grid = (1, rows, columns)
        return ProcessedImage(np.ascontiguousarray(patches), settings.table, grid, num_tokens)

    def fitting_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to resize to. Raises RequestError for too long an image."""
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise RequestError(
                f"the image has {width} x {height} pixels; its longer side may be at most"
                f" {MAX_ASPECT_RATIO} times its shorter side. Crop it."
            )
        unit = self.patch_size * self.merge_size
        least, most = self.settings.size["shortest_edge"], self.settings.size["longest_edge"]
        rounded = round(height / unit) * unit, round(width / unit) * unit
        if rounded[0] * rounded[1] > most:
            shrink = math.sqrt(height * width / most)
            return (
                max(unit, math.floor(height / shrink / unit) * unit),
                max(unit, math.floor(width / shrink / unit) * unit),
            )
        if rounded[0] * rounded[1] < least:
            grow = math.sqrt(least / (height * width))
            return math.ceil(height * grow / unit) * unit, math.ceil(width * grow / unit) * unit
        return rounded
