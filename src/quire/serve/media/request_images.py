"""The images of a request, from its messages to its prompt.

    async with api.images.open(messages, takes_images) as images:   the bytes, with their digests
        images.messages                     for hooks: with {"type": "image", "sha256": ...}
        await images.prepared(messages, ..) for the renderer: with {"type": "image"}

The images of one request are bounded, and so are the images of all open requests. A request beyond
the second bound fails with EngineBusy.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from quire.base.errors import HOOK_FAILED, EngineBusy, HookFailed, RequestError
from quire.base.settings.server_media import ServerMedia
from quire.render.media.prepared import PreparedMedia
from quire.serve.media.download import Downloads
from quire.serve.media.parts import ImagePart, change_parts, error_at, take_images, wrong
from quire.serve.media.sources import MediaSources

MAX_FILE_BYTES = 32 << 20
MAX_PIXELS = 64 << 20  # pixels of one image
MAX_ALL_PIXELS = 256 << 20  # pixels of a request's images together
NUM_THREADS = 8  # threads that read files and downloads
MAX_READS = 64  # images that are being read or wait for a thread
MAX_OPEN_BYTES = 512 << 20  # bytes of the images of all open requests
NO_IMAGES = "is an image, and this model does not accept images; remove it"

Messages = Sequence[Mapping[str, Any]]


class Decoder(Protocol):
    """Preparer of an image file for a model (`render/media/media_renderer.py`)."""

    async def file_async(self, data: bytes, max_pixels: int | None = None) -> PreparedMedia:
        """Return the image. Raises RequestError for an unusable file, and EngineBusy if too many
        images wait."""
        ...


@dataclass(frozen=True)
class ImageFile:
    """The bytes of an image. where: the field that contained it."""

    data: bytes = field(repr=False)
    where: str


@dataclass(frozen=True)
class RequestImages:
    """Images of a request. messages: with digests in place of images. files: by hex digest."""

    messages: Messages
    files: Mapping[str, ImageFile]

    async def prepared(
        self, messages: Messages, decoder: Decoder | None, max_tokens: int
    ) -> tuple[Messages, list[PreparedMedia]]:
        """Return messages with a plain part for each image, and the media in order of the parts.

        messages: `self.messages`, which hooks may have changed. max_tokens: limit of all images.
        Raises RequestError for unusable files or above max_tokens, EngineBusy, and HookFailed for
        an image that is not in the request.
        """
        if not self.files:
            return messages, []
        assert decoder is not None
        digests: list[str] = []
        plain = change_parts(messages, lambda part, where: self._plain(part, digests))
        max_image_pixels = min(MAX_PIXELS, MAX_ALL_PIXELS // max(1, len(self.files)))
        names = list(dict.fromkeys(digests))
        made = await gathered(
            _decoded(decoder, self.files[name], max_image_pixels) for name in names
        )
        by_name = dict(zip(names, made, strict=True))
        media = [by_name[name] for name in digests]
        num_tokens = sum(each.num_tokens for each in media)
        if num_tokens > max_tokens:
            raise RequestError(
                f"messages: the images have {num_tokens} tokens, and max_model_len is {max_tokens};"
                " send fewer or smaller images.",
                "messages",
            )
        return plain, media

    def _plain(self, part: Any, digests: list[str]) -> Any:
        if not isinstance(part, Mapping) or part.get("type") != "image":
            return part
        name = part.get("sha256")
        if not isinstance(name, str) or name not in self.files:
            text = "a hook of this server returned an image that the request does not hold."
            raise HookFailed(text, HOOK_FAILED)
        digests.append(name)
        return {"type": "image"}


class ImageReader:
    """Reader of the images of requests, within the operator's settings."""

    def __init__(self, config: ServerMedia) -> None:
        folder = config.allowed_local_media_path
        self._max_images = config.max_images
        self._max_bytes = config.max_media_bytes
        max_bytes = min(MAX_FILE_BYTES, config.max_media_bytes)
        self.sources = MediaSources(
            None if folder is None else Path(folder),
            Downloads(config.allowed_media_domains, max_bytes),
            max_bytes,
        )
        self._threads = ThreadPoolExecutor(NUM_THREADS, "images")
        self._num_reads = 0
        self._num_bytes = 0

    @asynccontextmanager
    async def open(self, messages: Messages, takes_images: bool) -> AsyncIterator[RequestImages]:
        """Read the images of a conversation, and hold their bytes while the context is open.

        Raises RequestError for a part that is invalid or not allowed, and EngineBusy.
        """
        taken, parts = take_images(messages, self._max_images)
        if not parts:
            yield RequestImages(messages, {})
            return
        if not takes_images:
            raise wrong(parts[0].where, NO_IMAGES)
        data: dict[str, bytes] = {}
        try:
            await self._read({each.url: each for each in reversed(parts)}, data)
            yield await asyncio.to_thread(_named, taken, data)
        finally:
            self._num_bytes -= sum(map(len, data.values()))

    async def _read(self, parts: Mapping[str, ImagePart], data: dict[str, bytes]) -> None:
        """Read the file of each URL into `data`, and count its bytes against the limits."""
        if self._num_reads and self._num_reads + len(parts) > MAX_READS:
            raise EngineBusy(f"{self._num_reads} images are being read; try again later.")
        loop, num_bytes = asyncio.get_running_loop(), 0

        async def read(part: ImagePart) -> None:
            nonlocal num_bytes
            try:
                found = await loop.run_in_executor(self._threads, self.sources.read, part.url)
            except RequestError as error:
                raise error_at(part.where, error) from None
            num_bytes += len(found)
            if num_bytes > self._max_bytes:
                rule = (
                    f"makes the images of the request exceed {self._max_bytes:,} bytes, the limit"
                )
                raise wrong(part.where, f"{rule}; send fewer or smaller images")
            others = self._num_bytes + len(found) - num_bytes
            if others and others + num_bytes > MAX_OPEN_BYTES:
                raise EngineBusy(
                    f"images with {others:,} bytes are being decoded; try again later."
                )
            data[part.url] = found
            self._num_bytes += len(found)

        self._num_reads += len(parts)
        try:
            await gathered(read(part) for part in parts.values())
        finally:
            self._num_reads -= len(parts)


def _named(messages: Messages, data: Mapping[str, bytes]) -> RequestImages:
    """Return the images, keyed by digest. messages: conversation with ImageParts."""
    files: dict[str, ImageFile] = {}

    def named(part: Any, where: str) -> Any:
        if not isinstance(part, ImagePart):
            return part
        found = data[part.url]
        name = hashlib.sha256(found).hexdigest()
        files.setdefault(name, ImageFile(found, part.where))
        return {"type": "image", "sha256": name}

    return RequestImages(change_parts(messages, named), files)


async def _decoded(decoder: Decoder, file: ImageFile, max_pixels: int) -> PreparedMedia:
    try:
        return await decoder.file_async(file.data, max_pixels)
    except RequestError as error:
        raise error_at(file.where, error) from None


async def gathered(works: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results of coroutines. The first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
