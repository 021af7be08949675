"""The interface of image processors, and the settings that they read.

A processor converts RGB pixels to the arrays that a vision tower reads, and returns the number of
placeholder tokens. Each family has one file: `qwen_vl.py`, `gemma3.py`, `llava.py`.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from quire.base.errors import ModelError
from quire.render.media.image_files import Pixels
from quire.render.media.image_ops import Float32, value_table

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ProcessedImage:
    """The input of a vision tower for one image."""

    pixels: Pixels  # uint8; each family defines its axes
    table: Float32  # [3, 256]: the model input for each value of each channel
    grid: tuple[int, ...]  # layout of the pixels; each family defines it
    num_tokens: int  # placeholder tokens


class ImageProcessor(Protocol):
    """Preprocessing of one model family."""

    @property
    def table(self) -> Float32:
        """Return the value table of every processed image, float32 [3, 256]."""
        ...

    def process(self, image: Pixels) -> ProcessedImage:
        """Return the arrays for an RGB image, uint8 [H, W, 3]. Raises RequestError for a size that
        the model rejects."""
        ...


@dataclass(frozen=True)
class ImageSettings:
    """Settings of `preprocessor_config.json`, with the family's defaults filled in."""

    size: dict[str, int]
    crop_size: dict[str, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int = Image.Resampling.BICUBIC
    rescale_factor: float = 1 / 255
    do_resize: bool = True
    do_center_crop: bool = False
    do_rescale: bool = True
    do_normalize: bool = True
    do_pad: bool = False

    @property
    def table(self) -> Float32:
        """Return the value table [3, 256] of these settings."""
        scale = self.rescale_factor if self.do_rescale else None
        mean, std = (self.mean, self.std) if self.do_normalize else (None, None)
        return value_table(mean, std, scale, channels=3)


@dataclass(frozen=True)
class SettledImages:
    """The base of all families' processors: a processor with fixed settings."""

    settings: ImageSettings

    @property
    def table(self) -> Float32:
        """Return the value table of the settings."""
        return self.settings.table


def read_settings(config: dict[str, Any], **defaults: Any) -> ImageSettings:
    """Return the settings of a family: its defaults, overridden by the checkpoint's file.

    Raises ModelError for an invalid value.
    """
    given = {**defaults}
    for name in ("resample", "rescale_factor", *(k for k in config if k.startswith("do_"))):
        if name in ImageSettings.__dataclass_fields__ and config.get(name) is not None:
            given[name] = config[name]
    for ours, theirs in (("mean", "image_mean"), ("std", "image_std")):
        if config.get(theirs) is not None:
            given[ours] = _three_numbers(theirs, config[theirs])
    for name in ("size", "crop_size"):
        if config.get(name) is not None:
            given[name] = _sizes(name, config[name])
    return ImageSettings(**given)


def _three_numbers(name: str, value: Any) -> tuple[float, ...]:
    numbers = [value] * 3 if isinstance(value, int | float) else value
    if len(numbers) != 3 or not all(isinstance(number, int | float) for number in numbers):
        raise ModelError(f"preprocessor_config.json: {name} must be 3 numbers, got {value!r}.")
    return tuple(float(number) for number in numbers)


def _sizes(name: str, value: Any) -> dict[str, int]:
    """Return a size as a dict. A single number is the shorter edge, or the side of a crop."""
    if isinstance(value, int):
        is_crop = name == "crop_size"
        return {"height": value, "width": value} if is_crop else {"shortest_edge": value}
    if isinstance(value, dict) and all(isinstance(each, int) for each in value.values()):
        return value
    raise ModelError(f"preprocessor_config.json: {name} must be a size, got {value!r}.")
