"""Preprocessed images and videos, and a cache of recently used images."""

import hashlib
import json
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.base.requests.media_items import MediaItem

if TYPE_CHECKING:
    from quire.render.media.processor import ProcessedImage

IMAGE, VIDEO = "image", "video"
MAX_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class PreparedMedia:
    """One image or video after preprocessing."""

    kind: str
    # One for each run of placeholder tokens, in the prompt's order, with start 0. Usually one item.
    # Gemma 3 has one for each crop of an image; Qwen3-VL one for each time step of a video's grid.
    items: tuple[MediaItem, ...]
    seconds: tuple[float, ...] = ()  # each item's time in the video, if the prompt contains it

    @property
    def num_tokens(self) -> int:
        """Return the number of placeholder tokens of all items."""
        return sum(item.num_tokens for item in self.items)

    @property
    def num_bytes(self) -> int:
        """Return the memory of the pixels and tables."""
        return sum(len(item.pixels) + len(item.table) for item in self.items)


def media_item(
    image: "ProcessedImage",
    family: str,
    kind: str = IMAGE,
    seconds_per_grid: float = 0.0,
    is_whole: bool = False,
) -> MediaItem:
    """Return the item of a preprocessed image. Its digest covers all of it except its start.

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


class MediaCache:
    """Cache of prepared images by the SHA-256 of their files. All methods are thread-safe.

    max_bytes: limit for all pixels and tables; the least recently used image is evicted first.
    """

    def __init__(self, max_bytes: int = MAX_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, PreparedMedia] = OrderedDict()
        self._num_bytes = 0

    @staticmethod
    def key(data: bytes) -> bytes:
        """Return the cache key of a file."""
        return hashlib.sha256(data).digest()

    def get(self, key: bytes) -> PreparedMedia | None:
        """Return the image of a file and mark it as most recently used; None if it is absent."""
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                self._found.move_to_end(key)
            return found

    def put(self, key: bytes, media: PreparedMedia) -> None:
        """Add an image, unless it alone exceeds the limit."""
        if media.num_bytes > self._max_bytes:
            return
        with self._lock:
            if key in self._found:
                return
            self._found[key] = media
            self._num_bytes += media.num_bytes
            while self._num_bytes > self._max_bytes:
                _, left = self._found.popitem(last=False)
                self._num_bytes -= left.num_bytes
