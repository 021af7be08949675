"""The worker process that decodes and preprocesses images, under `render/jobs/job_worker.py`.

    job      length of a header, the header (settings and limits as JSON), the file's bytes
    answer   length of a header, the header (shape, grid, number of tokens as JSON), the pixels

The process imports no torch.
"""

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from quire.base.errors import RequestError
from quire.render.jobs.job_pool import MAX_ANSWER_BYTES, JobKind
from quire.render.jobs.job_worker import LENGTH, serve_jobs
from quire.render.media.image_files import ImageLimits, check_bytes, decode_image
from quire.render.media.image_ops import Float32
from quire.render.media.processor import ProcessedImage
from quire.render.media.processors import MediaSettings, image_processor

MAX_HEADER_BYTES = 1 << 12  # size of an answer's header
IMAGES = JobKind(
    module="quire.render.media.media_worker",
    cpu_s=20.0,
    memory_bytes=1 << 30,
    answer_s=120.0,
    subject="the image",
    work=" to decode",
    advice="send a smaller image",
    waiting="images wait to be decoded",
    wait_s=60.0,
)


def pack_job(data: bytes, settings: MediaSettings, limits: ImageLimits) -> bytes:
    """Return the job that preprocesses an image file.

    Raises RequestError for a file over the limit, which needs no process.
    """
    check_bytes(data, limits)
    return _pack([asdict(settings), asdict(limits)], data)


def unpack_answer(answer: bytes, table: Float32) -> ProcessedImage:
    """Return the image in an answer. `table` is the value table of the job's settings."""
    (shape, grid, num_tokens), pixels = _unpack(answer)
    return ProcessedImage(
        np.frombuffer(pixels, np.uint8).reshape(shape), table, tuple(grid), num_tokens
    )


def work(job: bytes) -> bytes:
    """Return the answer to a job. Raises RequestError for an unusable file."""
    (settings, limits), data = _unpack(job)
    pixels = decode_image(bytes(data), ImageLimits(**limits))
    image = image_processor(MediaSettings(**settings)).process(pixels)
    if image.pixels.nbytes > MAX_ANSWER_BYTES - MAX_HEADER_BYTES:
        raise RequestError(
            f"the image has {image.pixels.nbytes:,} bytes after preprocessing, more than the limit"
            f" of {MAX_ANSWER_BYTES - MAX_HEADER_BYTES:,}; scale it down."
        )
    return _pack([image.pixels.shape, image.grid, image.num_tokens], image.pixels.tobytes())


def _pack(header: list[object], data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return LENGTH.pack(len(text)) + text + data


def _unpack(message: bytes) -> tuple[Any, memoryview]:
    start = LENGTH.size + LENGTH.unpack_from(message)[0]
    return json.loads(message[LENGTH.size : start]), memoryview(message)[start:]


if __name__ == "__main__":
    serve_jobs(work, "the image cannot be read")
