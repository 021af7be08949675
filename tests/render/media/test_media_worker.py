"""Images are decoded in a bounded process, which survives hostile files."""

import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from quire.base.errors import RequestError
from quire.render.jobs.job_pool import JobPool
from quire.render.media.image_files import ImageLimits
from quire.render.media.media_worker import IMAGES, pack_job, unpack_answer
from quire.render.media.processor import ProcessedImage
from quire.render.media.processors import MediaSettings, image_processor
from tests.render.media.test_processors import encoded, picture

SETTINGS = MediaSettings("qwen2_vl", {"max_pixels": 28 * 28 * 16})
LIMITS = ImageLimits()
SOURCE = picture(60, 90)


@pytest.fixture(scope="module")
def pool() -> Iterator[JobPool]:
    pool = JobPool(IMAGES, max_processes=1)
    yield pool
    for process in pool._idle:
        process.kill()


def processed(pool: JobPool, data: bytes) -> ProcessedImage:
    table = image_processor(SETTINGS).table
    return unpack_answer(pool.run_bytes(pack_job(data, SETTINGS, LIMITS)), table)


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(width: int, height: int, *extra: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(b"\0" * ((min(width, 64) + 1) * min(height, 64))))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(extra) + rows + chunk(b"IEND", b"")


def check_still_works(pool: JobPool) -> None:
    ours = processed(pool, encoded(SOURCE))
    here = image_processor(SETTINGS).process(np.asarray(SOURCE))
    np.testing.assert_array_equal(ours.pixels, here.pixels)
    np.testing.assert_array_equal(ours.table, here.table)
    assert (ours.grid, ours.num_tokens) == (here.grid, here.num_tokens)


BOMB = zlib.compress(b"\0" * (80 << 20))
HOSTILE = {
    "pixels": png(60_000, 60_000),
    "text": b"hello",
    "aspect": encoded(Image.new("L", (1000, 1))),
    "truncated": encoded(SOURCE)[:200],
}


def test_worker_gives_the_pixels_of_the_processor(pool: JobPool) -> None:
    check_still_works(pool)


@pytest.mark.parametrize("name", HOSTILE)
def test_worker_rejects_hostile_files_and_keeps_working(pool: JobPool, name: str) -> None:
    with pytest.raises(RequestError, match="image"):
        processed(pool, HOSTILE[name])
    check_still_works(pool)


@pytest.mark.parametrize("name", [b"zTXt", b"iCCP"])
def test_worker_survives_chunks_that_decompress_to_80_mib(pool: JobPool, name: bytes) -> None:
    data = png(30, 30, chunk(name, b"x\0\0" + BOMB))
    try:
        assert processed(pool, data).num_tokens > 0
    except RequestError as error:
        assert "image" in str(error)
    check_still_works(pool)


def test_worker_decodes_one_of_thousands_of_frames(pool: JobPool) -> None:
    first = encoded(Image.new("P", (30, 30)), "GIF")
    start = first.index(b",", 13 + 3 * 2 ** ((first[10] & 7) + 1))
    data = first[:-1] + first[start:-1] * 5000 + b";"
    assert processed(pool, data).num_tokens > 0


def test_long_files_are_rejected_before_they_are_sent_to_the_worker() -> None:
    with pytest.raises(RequestError, match="more than the limit of 3"):
        pack_job(b"long", SETTINGS, ImageLimits(max_bytes=3))


def test_worker_does_not_import_torch() -> None:
    code = "import sys, quire.render.media.media_worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
