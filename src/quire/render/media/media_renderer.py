"""`MediaRenderer`: images and videos of one model, from files or pixels to items of a prompt.

A server calls it in two steps:

    media = [await renderer.media.file_async(data) for data in files]    # in bounded processes
    prompt = await async_renderer.render(messages, options, media=media)

The messages hold {"type": "image"} in place of each image (`parts.take_media`). The media are in
the order of these parts. `prompt.media` holds the request's items. Built-in families have the same
placeholders as transformers' processors.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from quire.render.jobs.job_pool import JobPool
from quire.render.media.image_files import ImageLimits, Pixels, pixels_of
from quire.render.media.media_worker import IMAGES, pack_job, unpack_answer
from quire.render.media.model_files import QWEN, QWEN3, ModelFiles, read_model_files
from quire.render.media.placeholders import PackagedImages, Placeholder, Placeholders
from quire.render.media.prepared import IMAGE, VIDEO, MediaCache, PreparedMedia, media_item
from quire.render.media.processor import ProcessedImage
from quire.render.media.processors import (
    LLAVA,
    MediaSettings,
    image_processor,
    media_settings,
    video_processor,
)
from quire.render.media.videos import Frames, frames_of
from quire.render.tokens.tokenizer import Tokenizer
from quire.spec.media_families import FAMILIES


def built_in_placeholders(
    model_type: str, named: Mapping[str, str], processor: Mapping[str, Any]
) -> dict[str, Placeholder]:
    """Return the placeholders of a built-in family by kind.

    named: the tokenizer's tokens by name, such as `image_token`. processor: the contents of
    `processor_config.json`.
    """
    if model_type in QWEN:
        return _qwen(named, has_times=model_type in QWEN3)
    if model_type == "gemma3":
        return {IMAGE: _gemma(named)}
    assert model_type in LLAVA, model_type
    token = named.get("image_token") or processor.get("image_token") or "<image>"
    return {IMAGE: Placeholder(str(token), str(token))}


def _qwen(named: Mapping[str, str], has_times: bool) -> dict[str, Placeholder]:
    image = named.get("image_token", "<|image_pad|>")
    video = named.get("video_token", "<|video_pad|>")
    begin = named.get("vision_start_token", "<|vision_start|>")
    end = named.get("vision_end_token", "<|vision_end|>")

    def with_times(media: PreparedMedia) -> str:
        return "".join(f"<{each:.1f} seconds>{begin}{video}{end}" for each in media.seconds)

    return {
        IMAGE: Placeholder(image, image),
        VIDEO: Placeholder(video, video, with_times if has_times else None),
    }


def _gemma(named: Mapping[str, str]) -> Placeholder:
    """Return Gemma's placeholder. It writes an image and its crops, which attend as a whole."""
    begin = named.get("boi_token", "<start_of_image>")
    token = named.get("image_token", "<image_soft_token>")
    end = named.get("eoi_token", "<end_of_image>")
    one = f"\n\n{begin}{token}{end}\n\n"

    def write(media: PreparedMedia) -> str:
        num_crops = len(media.items) - 1
        if not num_crops:
            return one
        crops = " ".join([one] * num_crops)
        return (
            f"Here is the original image {one} and here are some crops to help you see better"
            f" {crops}"
        )

    return Placeholder(begin, token, write, is_whole=True)


def separated_image(model_type: str, image: ProcessedImage) -> list[ProcessedImage]:
    """Return the parts of an image that have placeholder tokens of their own, in their order."""
    if model_type != "gemma3":
        return [image]
    num_tokens = image.num_tokens // len(image.pixels)
    return [ProcessedImage(square[None], image.table, (1,), num_tokens) for square in image.pixels]


class MediaRenderer:
    """Prepares media for one model. All methods are thread-safe and work from any event loop.

    settings: settings of the model's image processor.
    placeholders: placeholders in the model's prompts.
    limits: bounds on image files.
    cache: cache of decoded files.
    The first file starts the first decoding process. Pixels in memory are preprocessed in this
    process. Raises ModelError for invalid settings.
    """

    def __init__(
        self,
        settings: MediaSettings,
        placeholders: Placeholders,
        limits: ImageLimits | None = None,
        cache: MediaCache | None = None,
    ) -> None:
        self.settings, self.placeholders = settings, placeholders
        self.limits = limits or ImageLimits()
        self._cache = cache or MediaCache()
        self._pool = JobPool(IMAGES)
        self._processor, self._videos = image_processor(settings), video_processor(settings)

    @classmethod
    def from_directory(cls, path: str | Path, tokenizer: Tokenizer) -> "MediaRenderer":
        """Return the renderer of a model directory. Raises ModelError for a model whose images
        have no processor."""
        files = read_model_files(Path(path))
        settings = media_settings(files)
        return cls(settings, Placeholders(_placeholders(settings, files, tokenizer), tokenizer))

    # ---- files -------------------------------------------------------------------------------

    def file(self, data: bytes) -> PreparedMedia:
        """Return the image in a file. Raises RequestError if the file is damaged, too large or of
        another format, and EngineBusy if too many images wait."""
        key = MediaCache.key(data)
        found = self._cache.get(key)
        if found is None:
            answer = self._pool.run_bytes(pack_job(data, self.settings, self.limits))
            found = self._taken(key, answer)
        return found

    async def file_async(self, data: bytes, max_pixels: int | None = None) -> PreparedMedia:
        """Do the same as `file` without blocking the event loop.

        max_pixels: replaces `ImageLimits.max_pixels` if it is smaller."""
        key = await asyncio.to_thread(MediaCache.key, data)
        found = self._cache.get(key)
        if found is None:
            limits = self.limits if max_pixels is None else self._limits(max_pixels)
            job = await asyncio.to_thread(pack_job, data, self.settings, limits)
            answer = await self._pool.run_bytes_async(job)
            found = await asyncio.to_thread(self._taken, key, answer)
        return found

    def _limits(self, max_pixels: int) -> ImageLimits:
        return replace(self.limits, max_pixels=min(max_pixels, self.limits.max_pixels))

    def _taken(self, key: bytes, answer: bytes) -> PreparedMedia:
        media = self._prepared(unpack_answer(answer, self._processor.table))
        self._cache.put(key, media)
        return media

    # ---- pixels ------------------------------------------------------------------------------

    def image(self, pixels: Pixels) -> PreparedMedia:
        """Return a preprocessed image, from uint8 [H, W, 3]. Raises RequestError for a size that
        the model rejects."""
        return self._prepared(self._processor.process(pixels))

    def video(self, frames: Frames) -> PreparedMedia:
        """Return a preprocessed video. Raises RequestError for a size that the model rejects, and
        for a model without videos."""
        self.placeholders.mark(VIDEO)
        assert self._videos is not None, "a model with a token for videos has a processor for them"
        family, depth = self.settings.model_type, self._videos.images.temporal_patch_size
        video = self._videos.process(frames.pixels)
        if family not in QWEN3:
            seconds = depth / frames.sampled_fps
            return PreparedMedia(VIDEO, (media_item(video, family, VIDEO, seconds),))
        items = [media_item(part, family, VIDEO) for part in self._videos.each_time(video)]
        return PreparedMedia(VIDEO, tuple(items), frames.seconds(depth))

    def in_memory(self, kind: str, source: Any) -> PreparedMedia:
        """Return an image or a video from a Python object (`pixels_of`, `frames_of`).

        Raises RequestError for other objects."""
        return self.video(frames_of(source)) if kind == VIDEO else self.image(pixels_of(source))

    def _prepared(self, image: ProcessedImage) -> PreparedMedia:
        family, is_whole = self.settings.model_type, self.placeholders.is_whole(IMAGE)
        parts = separated_image(family, image)
        items = tuple(media_item(part, family, is_whole=is_whole) for part in parts)
        return PreparedMedia(IMAGE, items)


def _placeholders(
    settings: MediaSettings, files: ModelFiles, tokenizer: Tokenizer
) -> dict[str, Placeholder]:
    """Return the placeholders of a built-in family, or of a package's processor."""
    if settings.model_type in FAMILIES:
        named = tokenizer.named_tokens
        return built_in_placeholders(settings.model_type, named, files.processor)
    packaged = cast(PackagedImages, image_processor(settings))
    return {IMAGE: packaged.placeholder()}
