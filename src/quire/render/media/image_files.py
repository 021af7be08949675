"""Decode an image file into upright RGB pixels.

Input: the bytes of a file from a client. Output: a uint8 array [H, W, 3]. The caller runs this in a
process with limits on CPU time and memory (`media_worker.py`). This module first checks cheaper
limits: the file's size, its format, and the number of pixels in its header.

EXIF rotation is applied and transparency is composited onto white. Pillow's own rules convert
everything else, 16-bit values included, as in transformers' PIL processors.
"""

import io
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from quire.base.errors import RequestError

Pixels = npt.NDArray[np.uint8]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
WHITE = (255, 255, 255, 255)


@dataclass(frozen=True)
class ImageLimits:
    """Bounds on one image file."""

    max_bytes: int = 32 << 20  # size of the encoded file
    max_pixels: int = 64 << 20  # width times height, from the header
    max_aspect_ratio: float = 200.0  # longer side over shorter side


def decode_image(data: bytes, limits: ImageLimits) -> Pixels:
    """Return the first frame of an image file as RGB, uint8 [H, W, 3].

    Raises RequestError for a file that is too large, damaged, or of another format.
    """
    check_bytes(data, limits)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return to_pixels(image, limits)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise RequestError(f"the image is in none of the formats {known}; convert it.") from None
    except Image.DecompressionBombError:
        raise RequestError(
            f"the image has more pixels than the limit of {limits.max_pixels:,}; scale it down."
        ) from None
    except RequestError:  # a ValueError, but the file is not damaged
        raise
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise RequestError(f"the image file is damaged: {error}; send another file.") from None


def check_bytes(data: bytes, limits: ImageLimits) -> None:
    """Raise RequestError for a file over the limit."""
    if len(data) > limits.max_bytes:
        raise RequestError(
            f"the image has {len(data):,} bytes, more than the limit of {limits.max_bytes:,};"
            " send a smaller file."
        )


def to_pixels(image: Image.Image, limits: ImageLimits) -> Pixels:
    """Return an image as upright RGB, uint8 [H, W, 3]. Raises RequestError if it is too large."""
    _check_size(image, limits)
    return _to_rgb(ImageOps.exif_transpose(image))


def pixels_of(source: object) -> Pixels:
    """Return the pixels of a Pillow image or an array, uint8 [H, W, 3].

    Raises RequestError for other objects."""
    if isinstance(source, Image.Image):
        try:
            return to_pixels(source, ImageLimits())
        except (OSError, SyntaxError) as error:  # Pillow reads the file only now
            raise RequestError(f"the picture cannot be read: {error}") from None
    return checked_array(source, 3, "an image", "[H, W, 3]")


def checked_array(source: object, num_axes: int, name: str, shape: str) -> Pixels:
    """Return an object as a uint8 array with three channels. Raises RequestError."""
    found = np.asarray(source)
    if found.dtype != np.uint8 or found.ndim != num_axes or found.shape[-1] != 3 or not found.size:
        raise RequestError(
            f"{name} must be a picture of Pillow or a uint8 array {shape}, got"
            f" {type(source).__name__} of {found.dtype} {list(found.shape)}."
        )
    return found


def _check_size(image: Image.Image, limits: ImageLimits) -> None:
    width, height = image.size
    if width * height > limits.max_pixels:
        raise RequestError(
            f"the image has {width} x {height} pixels, more than the limit of"
            f" {limits.max_pixels:,}; scale it down."
        )
    short, long = sorted((width, height))
    if short == 0 or long > limits.max_aspect_ratio * short:
        raise RequestError(
            f"the image has {width} x {height} pixels; its longer side may be at most"
            f" {limits.max_aspect_ratio:g} times its shorter side. Crop it."
        )


def _to_rgb(image: Image.Image) -> Pixels:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image)
    return np.asarray(image.convert("RGB"))
