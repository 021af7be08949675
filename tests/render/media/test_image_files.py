"""Images of every format and mode become the pixels that Pillow makes of them."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from quire.base.errors import RequestError
from quire.render.media.image_files import FORMATS, ImageLimits, decode_image
from tests.render.media.test_processors import encoded, picture

LIMITS = ImageLimits()
SOURCE = picture(23, 17)


def same_as(data: bytes, image: Image.Image) -> None:
    np.testing.assert_array_equal(decode_image(data, LIMITS), np.asarray(image))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_rotates_as_exif_says(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(SOURCE, "JPEG", exif=exif)
    stored = Image.open(io.BytesIO(data))
    same_as(data, ImageOps.exif_transpose(stored).convert("RGB"))
    turned = orientation > 4
    assert decode_image(data, LIMITS).shape[:2] == ((23, 17) if turned else (17, 23))


def test_composites_transparency_onto_white() -> None:
    image = SOURCE.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    white = Image.new("RGBA", image.size, "white")
    same_as(encoded(image), Image.alpha_composite(white, image).convert("RGB"))


def test_composites_a_transparent_colour_of_a_palette() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    pixels = decode_image(encoded(image, transparency=0), LIMITS)
    assert pixels.tolist() == [[[255, 255, 255], [0, 0, 255]]]


@pytest.mark.parametrize("form", ["BMP", "TIFF", "WEBP", "PNG"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_reads_formats_without_loss(form: str, mode: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    image = SOURCE.convert(mode)
    same_as(encoded(image, form, **options), image.convert("RGB"))


def test_converts_16_bits_and_cmyk_as_pillow_does() -> None:
    values = np.linspace(0, 65535, 23 * 17).astype(np.uint16).reshape(17, 23)
    for data in (
        encoded(Image.fromarray(values)),
        encoded(SOURCE.convert("CMYK"), "JPEG"),
    ):
        same_as(data, Image.open(io.BytesIO(data)).convert("RGB"))


def test_reads_the_first_frame_of_a_gif() -> None:
    frames = [Image.new("RGB", (3, 2), colour) for colour in ("red", "blue", "lime")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    same_as(data, frames[0])


@pytest.mark.parametrize("form", FORMATS)
def test_refuses_truncated_files(form: str) -> None:
    data = encoded(SOURCE, form)
    with pytest.raises(RequestError, match="image"):
        decode_image(data[: len(data) // 2], LIMITS)


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_refuses_what_is_no_image(data: bytes) -> None:
    with pytest.raises(RequestError, match="none of the formats"):
        decode_image(data, LIMITS)


def test_refuses_long_files_and_long_images() -> None:
    with pytest.raises(RequestError, match="more than the limit of 10"):
        decode_image(encoded(SOURCE), ImageLimits(max_bytes=10))
    with pytest.raises(RequestError, match="^the image has 201 x 1 pixels; its longer side"):
        decode_image(encoded(Image.new("L", (201, 1))), LIMITS)
    with pytest.raises(RequestError, match="more than the limit of 300"):
        decode_image(encoded(SOURCE), ImageLimits(max_pixels=300))


def test_images_beyond_pillows_own_limit_are_refused_with_that_of_quire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(RequestError, match=r"more pixels than the limit of 150; scale it down"):
        decode_image(encoded(SOURCE), ImageLimits(max_pixels=150))
