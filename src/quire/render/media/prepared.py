"""An image or a video that is ready for a prompt: its items, which have no place in it yet."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from quire.base.media.item import MediaItem
from quire.render.media.processor import ProcessedImage

IMAGE, VIDEO = "image", "video"


@dataclass(frozen=True)
class PreparedMedia:
    """One image or video after preprocessing.

    items: one for each run of placeholder tokens, in the order of the prompt, with `start` 0. Most
    media have one item. An image of Gemma 3 has one for each crop, a video of Qwen3-VL one for each
    entry of the grid's first dimension. seconds: for each of these the time in the video; empty
    unless the prompt names it.
    """

    kind: str
    items: tuple[MediaItem, ...]
    seconds: tuple[float, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Return the number of placeholder tokens of all items."""
        return sum(item.num_tokens for item in self.items)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the pixels and tables."""
        return sum(len(item.pixels) + len(item.table) for item in self.items)


def media_item(
    image: ProcessedImage,
    family: str,
    kind: str = IMAGE,
    seconds_per_grid: float = 0.0,
    is_whole: bool = False,
) -> MediaItem:
    """Return the item of a preprocessed image. Its digest covers everything but its place.

    family: the model's `model_type`, because families read the same pixels differently.
    """
    shape, grid = tuple(image.pixels.shape), tuple(map(int, image.grid))
    pixels = image.pixels.tobytes()
    table = np.ascontiguousarray(image.table, np.float32).tobytes()
    header = [family, kind, grid, shape, image.num_tokens, seconds_per_grid, is_whole, len(table)]
    digest = hashlib.sha256(json.dumps(header).encode())
    digest.update(table)
    digest.update(pixels)
    return MediaItem(
        start=0,
        num_tokens=image.num_tokens,
        digest=digest.digest(),
        kind=kind,
        grid=grid,
        shape=shape,
        pixels=pixels,
        table=table,
        seconds_per_grid=seconds_per_grid,
        is_whole=is_whole,
    )
