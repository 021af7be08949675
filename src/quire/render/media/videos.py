"""Videos of the Qwen families: frames of one size, cut into patches of several frames.

All given frames are used. Pillow resizes them, as it does images; transformers uses torchvision for
videos. Patches are ordered as in an image (`qwen_vl.py`), one time step of the grid after the
other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from quire.base.errors import RequestError
from quire.render.media.image_files import Pixels, checked_array, pixels_of
from quire.render.media.image_ops import Float32, resize
from quire.render.media.processor import CLIP_MEAN, CLIP_STD, HALF, ProcessedImage
from quire.render.media.qwen_vl import QwenImages

DEFAULT_FPS = 24.0  # rate of frames that come without one, as in transformers


@dataclass(frozen=True)
class Frames:
    """A video in memory."""

    pixels: Pixels  # uint8 [N, H, W, 3]
    fps: float = DEFAULT_FPS  # frames per second of the whole video
    indices: tuple[int, ...] = ()  # each frame's index in the whole video; empty for 0, 1, 2 ...
    total: int = 0  # frames of the whole video; 0 if these are all

    @property
    def sampled_fps(self) -> float:
        """Return the rate of the sampled frames, per second of video."""
        return len(self.pixels) / (self.total or len(self.pixels)) * self.fps

    def seconds(self, frames_per_patch: int) -> tuple[float, ...]:
        """Return the middle time of the frames of each patch."""
        indices = list(self.indices or range(len(self.pixels)))
        indices += indices[-1:] * (-len(indices) % frames_per_patch)
        times = [index / self.fps for index in indices]
        firsts, lasts = times[::frames_per_patch], times[frames_per_patch - 1 :: frames_per_patch]
        return tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))


def frames_of(source: Any) -> Frames:
    """Return the frames of a video given as a Python object. Raises RequestError.

    source: an array [N, H, W, 3], or a list of pictures or arrays. Or a pair of these and a
    dictionary with fps, frames_indices and total_num_frames, as vLLM's loaders return it.
    """
    details: Mapping[str, Any] = {}
    if isinstance(source, tuple):
        if len(source) != 2 or not isinstance(source[1], Mapping):
            raise RequestError("a pair must hold frames and a dictionary.")
        source, details = source
    if isinstance(source, list):
        if not source:
            raise RequestError("a video needs at least one frame.")
        frames = [pixels_of(each) for each in source]
        if len({each.shape for each in frames}) > 1:
            raise RequestError("all frames of a video must have the same size.")
        source = np.stack(frames)
    pixels = checked_array(source, 4, "a video", "[N, H, W, 3]")
    indices = tuple(int(each) for each in details.get("frames_indices") or ())
    fps = float(details.get("fps") or DEFAULT_FPS)
    if fps <= 0 or (indices and len(indices) != len(pixels)):
        raise RequestError(
            f"fps must be positive, got {fps}, and frames_indices must have an index for each of"
            f" the {len(pixels)} frames, got {len(indices)}."
        )
    return Frames(pixels, fps, indices, int(details.get("total_num_frames") or 0))


@dataclass(frozen=True)
class QwenVideos:
    """The video processor of a Qwen family."""

    images: QwenImages  # processor of the frames
    counts_all: bool  # whether the limit of pixels covers all frames together, as in Qwen3-VL

    @classmethod
    def from_config(cls, config: dict[str, Any], counts_all: bool) -> Self:
        """Return the processor that `video_preprocessor_config.json` describes."""
        unit = 32 if counts_all else 28
        num_pixels = 128 * unit**2, 768 * unit**2
        mean, std = (HALF, HALF) if counts_all else (CLIP_MEAN, CLIP_STD)
        images = QwenImages.from_config(config, num_pixels, mean, std, unit // 2)
        return cls(images, counts_all)

    @property
    def table(self) -> Float32:
        """Return the value table of the settings."""
        return self.images.table

    def process(self, frames: Pixels) -> ProcessedImage:
        """Return patches, uint8 [patches, 3, frames_per_patch, patch_size, patch_size].

        frames: uint8 [N, H, W, 3]. The last frame is repeated to fill the last patch. Raises
        RequestError for an extreme aspect ratio.
        """
        images, depth = self.images, self.images.temporal_patch_size
        height, width = frames.shape[1:3]
        if images.settings.do_resize:
            height, width = self.fitting_size(len(frames), height, width)
        resized = [resize(each, height, width, images.settings.resample) for each in frames]
        resized += resized[-1:] * (-len(resized) % depth)
        return images.cut(np.stack(resized), depth)

    def fitting_size(self, num_frames: int, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to resize to. Raises RequestError for an extreme aspect
        ratio."""
        if not self.counts_all:
            return self.images.fitting_size(height, width)
        unit = self.images.patch_size * self.images.merge_size
        if height < unit or width < unit:
            scale = max(unit / height, unit / width)
            height, width = int(height * scale), int(width * scale)
        depth = self.images.temporal_patch_size
        return self.images.fitting_size(height, width, num_frames, depth, "a frame")

    def each_time(self, video: ProcessedImage) -> list[ProcessedImage]:
        """Split a video into its time steps, which Qwen3-VL's prompts write one by one."""
        times, rows, columns = video.grid
        num_tokens = video.num_tokens // times
        return [
            replace(video, pixels=pixels, grid=(1, rows, columns), num_tokens=num_tokens)
            for pixels in np.split(video.pixels, times)
        ]
