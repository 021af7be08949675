"""Operations on pixels [H, W, C] in uint8, and the table that turns uint8 into model input.

Resizing is Pillow's. Rescaling and normalising map each of the 256 values of a channel to one
float32. So they are a table [C, 256], and pixels stay uint8 until the vision tower looks them up.
The table's values equal transformers' PIL processors bit for bit.
"""

import numpy as np
import numpy.typing as npt
from PIL import Image

from quire.render.media.image_files import Pixels

Float32 = npt.NDArray[np.float32]


def resize(image: Pixels, height: int, width: int, resample: int) -> Pixels:
    """Return the image [height, width, C], resampled by Pillow's filter of this number."""
    resized = Image.fromarray(image).resize((width, height), Image.Resampling(resample))
    return np.asarray(resized)


def size_by_short_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return (height, width) with the shorter side scaled to `edge`, the other rounded down."""
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)


def center_crop(image: Pixels, height: int, width: int) -> Pixels:
    """Return the middle [height, width, C]; what lies outside of the image is 0."""
    rows, columns = _crop_range(image.shape[0], height), _crop_range(image.shape[1], width)
    cropped = np.zeros((height, width, image.shape[2]), image.dtype)
    cropped[rows[1], columns[1]] = image[rows[0], columns[0]]
    return cropped


def _crop_range(size: int, length: int) -> tuple[slice, slice]:
    """Return the range of the image to keep, and its range in the crop."""
    start = (size - length) // 2
    if start >= 0:
        return slice(start, start + length), slice(0, length)
    return slice(0, size), slice(-start, size - start)


def value_table(
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    scale: float | None,
    channels: int,
) -> Float32:
    """Return the float32 table [channels, 256] that replaces the uint8 values of each channel.

    scale: factor before normalising; None leaves values unchanged.
    mean, std: one number per channel; None skips normalising.
    """
    values = np.arange(256, dtype=np.float64)
    scaled = (values if scale is None else values * scale).astype(np.float32)
    table = np.repeat(scaled[None], channels, axis=0)
    if mean is None or std is None:
        return table
    normalised: Float32 = (table - _column(mean)) / _column(std)
    return normalised


def _column(numbers: tuple[float, ...]) -> Float32:
    return np.array(numbers, np.float32)[:, None]
