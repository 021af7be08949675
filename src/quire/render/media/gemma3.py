"""Images of Gemma 3: one square per image, and optionally its crops ("pan and scan").

Each square becomes `image_seq_length` placeholder tokens between a begin and an end token.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from PIL import Image

from quire.render.media.image_files import Pixels
from quire.render.media.image_ops import resize
from quire.render.media.processor import (
    HALF,
    ProcessedImage,
    SettledImages,
    read_settings,
)


@dataclass(frozen=True)
class GemmaImages(SettledImages):
    """The processor of Gemma 3. Crops are cut only if `do_pan_and_scan` is set."""

    tokens_per_image: int = 256
    do_pan_and_scan: bool = False
    min_crop_size: int = 256
    max_num_crops: int = 4
    min_ratio: float = 1.2  # longer over shorter side, from which on crops are cut

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the processor that `preprocessor_config.json` describes."""
        square = {"height": 224, "width": 224}
        settings = read_settings(
            config, size=square, crop_size={}, mean=HALF, std=HALF,
            resample=Image.Resampling.BILINEAR,
        )  # fmt: skip
        names = {
            "tokens_per_image": "image_seq_length",
            "do_pan_and_scan": "do_pan_and_scan",
            "min_crop_size": "pan_and_scan_min_crop_size",
            "max_num_crops": "pan_and_scan_max_num_crops",
            "min_ratio": "pan_and_scan_min_ratio_to_activate",
        }
        given = {ours: config[name] for ours, name in names.items() if config.get(name) is not None}
        return cls(settings, **given)

    def process(self, image: Pixels) -> ProcessedImage:
        """Return the image and its crops, uint8 [1 + crops, H, W, 3]."""
        settings = self.settings
        parts = [image, *self.crops(image)]
        if settings.do_resize:
            height, width = settings.size["height"], settings.size["width"]
            parts = [resize(part, height, width, settings.resample) for part in parts]
        num_tokens = self.tokens_per_image * len(parts)
        return ProcessedImage(np.stack(parts), settings.table, (len(parts),), num_tokens)

    def crops(self, image: Pixels) -> list[Pixels]:
        """Return the crops of an elongated image; none if it is nearly square or too small."""
        height, width = image.shape[:2]
        short, long = sorted((height, width))
        if not self.do_pan_and_scan or long / short < self.min_ratio:
            return []
        count = min(long // self.min_crop_size, math.floor(long / short + 0.5))
        count = min(self.max_num_crops, max(2, count))
        across, down = (count, 1) if width >= height else (1, count)
        crop_width, crop_height = math.ceil(width / across), math.ceil(height / down)
        if min(crop_width, crop_height) < self.min_crop_size:
            return []
        return [
            image[top : top + crop_height, left : left + crop_width]
            for top, left in itertools.product(
                range(0, crop_height * down, crop_height), range(0, crop_width * across, crop_width)
            )
        ]
