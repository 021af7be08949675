"""Inputs of the image benchmarks: shapes of models, workloads, and pictures of random pixels.

Standard library only: the drivers import it in environments of their own.
"""

import random
from dataclasses import dataclass, replace

from benchmarks.cpu.workloads import Metric, Shape


@dataclass(frozen=True)
class Tower:
    """The sizes of a vision tower of Qwen3-VL."""

    depth: int  # blocks
    width: int
    inner: int  # of the feed-forward layers
    heads: int
    deepstack: tuple[int, ...]  # blocks after which features are taken
    num_positions: int  # rows of the table of positions
    patch: int = 16  # pixels on each side
    frames: int = 2  # an image counts as equal frames
    merge: int = 2  # patches on each side of a group

    @property
    def group(self) -> int:
        """Return the number of patches that become one token."""
        return self.merge**2


@dataclass(frozen=True)
class ImageShape:
    """A model's sizes. sections: shares of the rotary frequencies for time, height and width."""

    text: Shape
    tower: Tower
    sections: tuple[int, int, int]

    @property
    def name(self) -> str:
        return self.text.name

    def num_image_tokens(self, side: int) -> int:
        """Return the tokens of a square image. side: in pixels."""
        return (side // self.tower.patch) ** 2 // self.tower.group


def text_shape(name: str, *sizes: int) -> Shape:
    return Shape(name, "qwen3_vl_text", *sizes)


TOWER_2B = Tower(24, 1024, 4096, 16, (5, 11, 17), 2304)
SECTIONS = (24, 20, 20)
QWEN3_VL_2B = ImageShape(
    text_shape("qwen3-vl-2b", 2048, 28, 16, 8, 128, 6144, 151936), TOWER_2B, SECTIONS
)
# The same tower before the least text model that takes its features. OpenVINO's conversion needs
# as many text layers as there are blocks that give features.
TOWER_ALONE = ImageShape(
    text_shape("qwen3-vl-2b-tower", 2048, 3, 16, 8, 128, 256, 4096), TOWER_2B, SECTIONS
)
TINY_VL = ImageShape(
    text_shape("qwen3-vl-tiny", 128, 4, 4, 2, 32, 256, 2048),
    Tower(4, 64, 128, 4, (0, 1, 2), 256),
    (6, 5, 5),
)


@dataclass(frozen=True)
class ImageWorkload:
    """Square images of `side` pixels, each in a prompt of its own with `num_text` text tokens.

    num_text: counts the two tokens around the image. together: images of one call; each call has
    new images. repeats: calls in one process, after one that warms up. A prompt gives one token.
    """

    name: str
    shape: ImageShape
    side: int
    num_text: int
    together: int
    repeats: int

    @property
    def prompt_len(self) -> int:
        return self.num_text + self.shape.num_image_tokens(self.side)


NUM_SQUARES = 4  # on each side of a picture, so that pictures differ
SMALL_SIDE = 256  # of an image, to try the benchmark itself
WORKLOADS = [
    ImageWorkload("first", QWEN3_VL_2B, 1024, 64, together=1, repeats=2),
    ImageWorkload("stream", TOWER_ALONE, 1024, 16, together=4, repeats=1),
]
METRICS = [
    Metric("image_ttft_s", "first", "TTFT s", "one image, 64 text tokens: first token", 2, False),
    Metric("images_rate", "stream", "images/s", "different images, a tower and 3 text layers", 3),
]


def chosen_workload(name: str, is_small: bool) -> ImageWorkload:
    """Return a workload. is_small: with a tiny model and small images."""
    (found,) = [workload for workload in WORKLOADS if workload.name == name]
    return replace(found, shape=TINY_VL, side=SMALL_SIDE) if is_small else found


def random_pixels(side: int, seed: int) -> bytes:
    """Return RGB pixels of a square image, row by row: squares of random colours."""
    colours, size = random.Random(seed), side // NUM_SQUARES
    rows = (
        b"".join(colours.randbytes(3) * size for _ in range(NUM_SQUARES))
        for _ in range(NUM_SQUARES)
    )
    return b"".join(row * size for row in rows)
