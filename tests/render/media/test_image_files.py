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


def check_pixels(data: bytes, image: Image.Image) -> None:
    np.testing.assert_array_equal(decode_image(data, LIMITS), np.asarray(image))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_rotated_by_their_exif_orientation(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(SOURCE, "JPEG", exif=exif)
    stored = Image.open(io.BytesIO(data))
    check_pixels(data, ImageOps.exif_transpose(stored).convert("RGB"))
    turned = orientation > 4
    assert decode_image(data, LIMITS).shape[:2] == ((23, 17) if turned else (17, 23))


def test_transparent_pixels_are_composited_onto_white() -> None:
    image = SOURCE.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    white = Image.new("RGBA", image.size, "white")
    check_pixels(encoded(image), Image.alpha_composite(white, image).convert("RGB"))


def test_transparent_colour_of_a_palette_becomes_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putdata([0, 1])
    pixels = decode_image(encoded(image, transparency=0), LIMITS)
    assert pixels.tolist() == [[[255, 255, 255], [0, 0, 255]]]


@pytest.mark.parametrize("form", ["BMP", "TIFF", "WEBP", "PNG"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_lossless_formats_are_decoded_exactly(form: str, mode: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    image = SOURCE.convert(mode)
    check_pixels(encoded(image, form, **options), image.convert("RGB"))


def test_16_bit_and_cmyk_images_are_converted_as_by_pillow() -> None:
    values = np.linspace(0, 65535, 23 * 17).astype(np.uint16).reshape(17, 23)
    for data in (
        encoded(Image.fromarray(values)),
        encoded(SOURCE.convert("CMYK"), "JPEG"),
    ):
        check_pixels(data, Image.open(io.BytesIO(data)).convert("RGB"))


def test_gif_is_decoded_to_its_first_frame() -> None:
    frames = [Image.new("RGB", (3, 2), colour) for colour in ("red", "blue", "lime")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    check_pixels(data, frames[0])


@pytest.mark.parametrize("form", FORMATS)
def test_truncated_files_are_rejected(form: str) -> None:
    data = encoded(SOURCE, form)
    with pytest.raises(RequestError, match="image"):
        decode_image(data[: len(data) // 2], LIMITS)


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_files_that_are_not_images_are_rejected(data: bytes) -> None:
    with pytest.raises(RequestError, match="none of the formats"):
        decode_image(data, LIMITS)


def test_files_and_images_beyond_the_limits_are_rejected() -> None:
    with pytest.raises(RequestError, match="more than the limit of 10"):
        decode_image(encoded(SOURCE), ImageLimits(max_bytes=10))
    with pytest.raises(RequestError, match="^the image has 201 x 1 pixels; its longer side"):
        decode_image(encoded(Image.new("L", (201, 1))), LIMITS)
    with pytest.raises(RequestError, match="more than the limit of 300"):
        decode_image(encoded(SOURCE), ImageLimits(max_pixels=300))


def test_error_beyond_the_limit_of_pillow_states_the_limit_of_quire(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(RequestError, match=r"more pixels than the limit of 150; scale it down"):
        decode_image(encoded(SOURCE), ImageLimits(max_pixels=150))
