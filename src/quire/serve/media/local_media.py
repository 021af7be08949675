"""Images and videos in the prompts of a Python program (`LLM`, `AsyncLLM`), in vLLM's formats.

    messages    {"type": "image_url", "image_url": {"url": ...}}, {"type": "image_pil", ...}
    prompts     {"prompt": ..., "multi_modal_data": {"image": ..., "video": ...}}

The program's objects are trusted, so pictures and arrays are preprocessed in this process. Files
are decoded in bounded processes, whatever their source.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.base.errors import RequestError
from quire.render.media.parts import MediaPart, take_media
from quire.render.media.prepared import IMAGE, VIDEO, PreparedMedia
from quire.render.renderer import Renderer, is_conversation, no_media
from quire.serve.media.download import Downloads
from quire.serve.media.parts import error_at
from quire.serve.media.request_images import gathered
from quire.serve.media.sources import MediaSources

FIELD, OPTIONS = "multi_modal_data", "mm_processor_kwargs"


class LocalMedia:
    """Preparer of the media of prompts. folder: files below it may be read, "" allows none.
    domains: hosts that images may be downloaded from."""

    def __init__(self, renderer: Renderer, folder: str = "", domains: Sequence[str] = ()) -> None:
        self._renderer = renderer
        self._sources = MediaSources(
            Path(folder) if folder else None, Downloads(domains=tuple(domains))
        )

    def take(self, prompt: Any) -> tuple[Any, list[PreparedMedia]]:
        """Return a prompt in the form for `Renderer.render`, and its media. Raises RequestError for
        unusable media, or for a model without a vision tower."""
        prompt, parts = self._parts(prompt)
        return prompt, [self._prepared(part) for part in parts]

    async def take_async(self, prompt: Any) -> tuple[Any, list[PreparedMedia]]:
        """Do the same as `take` without blocking the event loop."""
        prompt, parts = self._parts(prompt)
        return prompt, await gathered(self._prepared_async(part) for part in parts)

    def take_all(self, prompts: Sequence[Any]) -> tuple[list[Any], list[list[PreparedMedia]]]:
        """Call `take` for several prompts; return the prompts, and the media of each."""
        taken = [self.take(prompt) for prompt in prompts]
        return [prompt for prompt, _ in taken], [media for _, media in taken]

    def _parts(self, prompt: Any) -> tuple[Any, list[MediaPart]]:
        parts = list[MediaPart]()
        if is_conversation(prompt):
            prompt, parts = take_media(prompt)
        elif isinstance(prompt, Mapping) and FIELD in prompt:
            data = prompt[FIELD]
            if data and prompt.get(OPTIONS):
                raise RequestError(
                    f"{OPTIONS} is not supported; set these values in the model's"
                    " preprocessor_config.json.",
                    OPTIONS,
                )
            prompt = {name: value for name, value in prompt.items() if name != FIELD}
            parts = _listed(data)
        if parts and self._renderer.media is None:
            raise no_media()
        return prompt, parts

    def _prepared(self, part: MediaPart) -> PreparedMedia:
        media = self._renderer.media
        assert media is not None, "checked with the parts"
        try:
            data = self._file_of(part)
            if data is not None:
                return media.file(data)
            return media.in_memory(part.kind, part.source)
        except RequestError as error:
            raise error_at(part.where, error) from None

    async def _prepared_async(self, part: MediaPart) -> PreparedMedia:
        media = self._renderer.media
        assert media is not None, "checked with the parts"
        if not isinstance(part.source, str | bytes):
            return await asyncio.to_thread(self._prepared, part)
        try:
            data = await asyncio.to_thread(self._file_of, part)
            assert data is not None, "texts and bytes are files"
            return await media.file_async(data)
        except RequestError as error:
            raise error_at(part.where, error) from None

    def _file_of(self, part: MediaPart) -> bytes | None:
        """Return the bytes of a part that is a URL, a path or bytes; None for other objects."""
        source = part.source
        if not isinstance(source, str | bytes):
            return None
        if part.kind != IMAGE:
            raise RequestError(
                "a video must be given as frames, an array [N, H, W, 3] or a list of pictures;"
                " files of videos are not decoded."
            )
        if isinstance(source, bytes):
            return source
        is_url = source.startswith("data:") or "://" in source[:16]
        return self._sources.read(source if is_url else Path(source).absolute().as_uri())


def _listed(data: Any) -> list[MediaPart]:
    """Return the media of `multi_modal_data`. Raises RequestError for kinds other than these."""
    if not data:
        return []
    if not isinstance(data, Mapping):
        raise RequestError(f"{FIELD} must be an object, got {type(data).__name__}.", FIELD)
    found = []
    for kind, given in data.items():
        if kind not in (IMAGE, VIDEO):
            raise RequestError(
                f"{FIELD} has {str(kind)[:40]!r}, which is not supported; give images or videos.",
                FIELD,
            )
        sources = _as_list(given, is_video=kind == VIDEO)
        found += [
            MediaPart(kind, source, f"{FIELD}.{kind}[{i}]") for i, source in enumerate(sources)
        ]
    return found


def _as_list(given: Any, is_video: bool) -> list[Any]:
    """Return the media items of one field as a list. A list of images is several images. A list of
    single pictures is one video, and a list of frame arrays or lists is several videos."""
    if given is None:
        return []
    if not isinstance(given, list):
        return [given]
    if not is_video or not given:
        return given
    first = given[0]
    is_one_video = not isinstance(first, list | tuple) and np.ndim(first) <= 3
    return [given] if is_one_video else given
