"""Images of LLaVA 1.5 (one square) and LLaVA-NeXT (one square and tiles of a larger grid).

LLaVA-NeXT chooses the grid that keeps most of the image. It scales the image into the grid, pads it
with black, and cuts it into tiles of the tower's size. The model then joins the features of the
tiles, cuts the padding off, and ends each row with a newline feature.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from PIL import Image

from quire.render.media.image_files import Pixels
from quire.render.media.image_ops import center_crop, resize, size_by_short_edge
from quire.render.media.processor import (
    CLIP_MEAN,
    CLIP_STD,
    ImageSettings,
    ProcessedImage,
    SettledImages,
    read_settings,
)

GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def _settings(config: dict[str, Any]) -> ImageSettings:
    return read_settings(
        config, size={"shortest_edge": 224}, crop_size={"height": 224, "width": 224},
        mean=CLIP_MEAN, std=CLIP_STD, resample=Image.Resampling.BICUBIC, do_center_crop=True,
    )  # fmt: skip


def to_tower_size(image: Pixels, settings: ImageSettings) -> Pixels:
    """Return the image resized and center-cropped according to the settings."""
    size, crop = settings.size, settings.crop_size
    if settings.do_resize:
        if "shortest_edge" in size:
            height, width = image.shape[:2]
            height, width = size_by_short_edge(height, width, size["shortest_edge"])
        else:
            height, width = size["height"], size["width"]
        image = resize(image, height, width, settings.resample)
    return center_crop(image, crop["height"], crop["width"]) if settings.do_center_crop else image


@dataclass(frozen=True)
class LlavaImages(SettledImages):
    """The processor of LLaVA 1.5."""

    patch_size: int = 14  # side of the tower's patches, in pixels
    num_extra_tokens: int = 0  # tokens for features without a patch, such as a class token

    @classmethod
    def from_config(cls, config: dict[str, Any], patch_size: int, num_extra_tokens: int) -> Self:
        """Return the processor that `preprocessor_config.json` describes."""
        return cls(_settings(config), patch_size, num_extra_tokens)

    def process(self, image: Pixels) -> ProcessedImage:
        """Return the image as one square, uint8 [1, H, W, 3]."""
        if self.settings.do_pad:
            image = _padded_to_square(image, self.settings.mean)
        square = to_tower_size(image, self.settings)
        rows, columns = (side // self.patch_size for side in square.shape[:2])
        num_tokens = rows * columns + self.num_extra_tokens
        return ProcessedImage(np.stack([square]), self.settings.table, (rows, columns), num_tokens)


@dataclass(frozen=True)
class LlavaNextImages(SettledImages):
    """The processor of LLaVA-NeXT."""

    patch_size: int = 14
    num_extra_tokens: int = 0
    grids: tuple[tuple[int, int], ...] = GRIDS  # (height, width) in pixels, from the checkpoint

    @classmethod
    def from_config(cls, config: dict[str, Any], patch_size: int, num_extra_tokens: int) -> Self:
        """Return the processor that `preprocessor_config.json` describes."""
        grids = tuple((height, width) for height, width in config.get("image_grid_pinpoints") or ())
        return cls(_settings(config), patch_size, num_extra_tokens, grids or GRIDS)

    def process(self, image: Pixels) -> ProcessedImage:
        """Return the square and the tiles, uint8 [1 + tiles, H, W, 3].

        The grid is (rows of tiles, columns of tiles, rows of features, columns of features). The
        last two count the features of the tiles that no padding fills.
        """
        settings, size = self.settings, self.settings.size
        height, width = image.shape[:2]
        edge = size.get("shortest_edge", 0)
        whole = size.get("height", edge), size.get("width", edge)
        square = resize(image, *whole, settings.resample)
        tile = settings.crop_size.get("height") or whole[0]
        grid = best_grid(height, width, self.grids)
        parts = [square, *_tiles(self._in_grid(image, grid), tile)]
        parts = [to_tower_size(part, settings) for part in parts]
        layout, num_tokens = self.layout(height, width, *parts[0].shape[:2])
        return ProcessedImage(np.stack(parts), settings.table, layout, num_tokens)

    def _in_grid(self, image: Pixels, grid: tuple[int, int]) -> Pixels:
        """Return the image scaled into the grid, in its middle, with black around it."""
        height, width = image.shape[:2]
        height, width = _scaled_into(height, width, *grid)
        resized = resize(image, height, width, self.settings.resample)
        top, left = (grid[0] - height) // 2, (grid[1] - width) // 2
        padded = np.zeros((*grid, image.shape[2]), np.uint8)
        padded[top : top + height, left : left + width] = resized
        return padded

    def layout(
        self, height: int, width: int, tile_height: int, tile_width: int
    ) -> tuple[tuple[int, int, int, int], int]:
        """Return the grid of an image of this size and the number of its placeholder tokens.

        Each feature of the square, each feature of the tiles outside padding, and each end of a row
        has one token.
        """
        grid = best_grid(height, width, self.grids)
        rows, columns = tile_height // self.patch_size, tile_width // self.patch_size
        down, across = grid[0] // tile_height, grid[1] // tile_width
        kept = unpadded(height, width, rows * down, columns * across)
        num_tokens = rows * columns + self.num_extra_tokens + kept[0] * kept[1] + kept[0]
        return (down, across, *kept), num_tokens


def best_grid(height: int, width: int, grids: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return the grid that keeps most pixels of the image; of equal grids the smallest."""

    def merit(grid: tuple[int, int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    return max(grids, key=merit)


def unpadded(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of features that an image of this size covers."""
    if width / height > columns / rows:
        covered = int(round(height * (columns / width), 7))
        return rows - (rows - covered) // 2 * 2, columns
    covered = int(round(width * (rows / height), 7))
    return rows, columns - (columns - covered) // 2 * 2


def _scaled_into(height: int, width: int, max_height: int, max_width: int) -> tuple[int, int]:
    by_width, by_height = max_width / width, max_height / height
    if by_width < by_height:
        return min(math.ceil(height * by_width), max_height), max_width
    return max_height, min(math.ceil(width * by_height), max_width)


def _tiles(image: Pixels, size: int) -> list[Pixels]:
    height, width = image.shape[:2]
    return [
        image[top : top + size, left : left + size]
        for top in range(0, height, size)
        for left in range(0, width, size)
    ]


def _padded_to_square(image: Pixels, mean: tuple[float, ...]) -> Pixels:
    """Return a square in the mean colour, with the image in its middle."""
    height, width, channels = image.shape
    side = max(height, width)
    square = np.empty((side, side, channels), np.uint8)
    square[:] = [int(value * 255) for value in mean]
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = image
    return square
