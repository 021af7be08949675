"""Media files are decoded in bounded processes that start on demand; results are cached."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from quire.base.errors import ModelError, RequestError
from quire.render.media.image_files import ImageLimits, decode_image
from quire.render.media.media_renderer import MediaRenderer
from quire.render.media.media_worker import work
from quire.render.media.model_files import ModelFiles, takes_images
from quire.render.media.prepared import MediaCache, PreparedMedia
from quire.render.media.processors import media_settings
from quire.render.media.qwen_vl import QwenImages
from quire.render.media.videos import Frames, QwenVideos
from quire.render.tokens.tokenizer import Tokenizer
from tests.render.media.test_processors import encoded, picture
from tests.support.render.tiny_tokenizers import renderer_of, write_vision_model

FILES = [encoded(picture(40, 30, seed)) for seed in range(3)]


class WorkerHere:
    """Runs the jobs of the decoding process in this process, and counts them."""

    def __init__(self) -> None:
        self.num_jobs = 0

    def run_bytes(self, job: bytes) -> bytes:
        self.num_jobs += 1
        return work(job)

    async def run_bytes_async(self, job: bytes) -> bytes:
        return self.run_bytes(job)


@pytest.fixture
def media(tmp_path: Path) -> MediaRenderer:
    found = renderer_of(write_vision_model(tmp_path, "qwen2_vl")).media
    assert found is not None
    return found


@pytest.fixture
def worker(media: MediaRenderer, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerHere]:
    worker = WorkerHere()
    monkeypatch.setattr(media, "_pool", worker)
    yield worker


def pixels(data: bytes) -> np.ndarray:
    return decode_image(data, ImageLimits())


def test_files_and_pixels_give_the_same_items(media: MediaRenderer, worker: WorkerHere) -> None:
    assert media.file(FILES[0]) == media.image(pixels(FILES[0]))
    for data in FILES:
        assert asyncio.run(media.file_async(data)) == media.image(pixels(data))
    assert worker.num_jobs == 3  # the first file was in the cache


def test_no_process_starts_before_the_first_file(media: MediaRenderer) -> None:
    media.image(pixels(FILES[0]))
    assert media._pool._idle == []
    media.file(FILES[0])
    [process] = media._pool._idle
    process.kill()


def test_damaged_file_does_not_fail_other_files(media: MediaRenderer, worker: WorkerHere) -> None:
    with pytest.raises(RequestError, match="none of the formats"):
        asyncio.run(media.file_async(b"hello"))
    with pytest.raises(RequestError, match="none of the formats"):
        media.file(b"hello")
    assert asyncio.run(media.file_async(FILES[0])) == media.file(FILES[0])
    with pytest.raises(RequestError, match="more than the limit"):
        media.file(b"x" * (media.limits.max_bytes + 1))


def test_cache_evicts_the_least_recently_used_media(media: MediaRenderer) -> None:
    images = [media.image(pixels(data)) for data in FILES]
    each = images[0].num_bytes
    assert each > 0
    cache = MediaCache(max_bytes=2 * each)
    for name, image in zip(b"ab", images, strict=False):
        cache.put(bytes([name]), image)
    assert cache.get(b"a") is images[0]
    cache.put(b"c", images[2])
    assert [cache.get(name) for name in (b"a", b"b", b"c")] == [images[0], None, images[2]]
    small = MediaCache(max_bytes=each - 1)
    small.put(b"a", images[0])
    assert small.get(b"a") is None


def test_evicted_file_is_decoded_again(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path, "qwen2_vl")
    settings = media_settings(ModelFiles({"model_type": "qwen2_vl"}))
    made = renderer_of(folder).media
    assert made is not None
    media = MediaRenderer(settings, made.placeholders, cache=MediaCache(max_bytes=1))
    worker = WorkerHere()
    media._pool = worker  # type: ignore[assignment]
    assert media.file(FILES[0]) == media.file(FILES[0])
    assert worker.num_jobs == 2


def test_only_models_with_a_tower_and_a_processor_accept_images(tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path, "gemma3")
    assert takes_images(folder)
    config = folder / "config.json"
    for text in ('{"model_type": "gemma3"}', '{"model_type": "mllama", "vision_config": {}}'):
        config.write_text(text)
        assert not takes_images(folder)
    assert not takes_images(tmp_path / "absent")


def test_tokenizer_without_the_placeholder_is_rejected(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(write_vision_model(tmp_path / "a", "llava"))
    other = write_vision_model(tmp_path / "b", "qwen2_vl")
    with pytest.raises(ModelError, match="no added token '<|image_pad|>'"):
        MediaRenderer.from_directory(other, tokenizer)


# ---- videos ----------------------------------------------------------------------------------


def test_video_of_one_repeated_image_has_the_patches_of_the_image() -> None:
    config = {"min_pixels": 784, "max_pixels": 28 * 28 * 40}
    image = np.asarray(picture(70, 50))
    video = QwenVideos.from_config(config, counts_all=False).process(np.stack([image] * 3))
    alone = QwenImages.from_config(config).process(image)
    assert video.grid == (2, *alone.grid[1:])
    assert video.num_tokens == 2 * alone.num_tokens
    for frame in range(2):
        of_time = np.split(video.pixels, 2)[frame]
        np.testing.assert_array_equal(of_time[:, :, 0], alone.pixels)
        np.testing.assert_array_equal(of_time[:, :, 1], alone.pixels)


def test_patch_of_a_video_holds_consecutive_frames() -> None:
    frames = np.zeros((4, 28, 28, 3), np.uint8) + np.arange(4, dtype=np.uint8)[:, None, None, None]
    videos = QwenVideos.from_config({"do_resize": False}, counts_all=False)
    video = videos.process(frames)
    assert video.pixels.shape == (8, 3, 2, 14, 14)
    assert video.pixels[:, 0, :, 0, 0].tolist() == [[0, 1]] * 4 + [[2, 3]] * 4
    parts = videos.each_time(video)
    assert [part.grid for part in parts] == [(1, 2, 2)] * 2
    np.testing.assert_array_equal(np.concatenate([part.pixels for part in parts]), video.pixels)


@pytest.mark.parametrize("size", [(4, 64, 64), (9, 37, 211), (2, 500, 333), (64, 20, 30)])
def test_pixel_limits_of_qwen3_apply_to_all_frames_together(size: tuple[int, int, int]) -> None:
    config = {"size": {"shortest_edge": 65536, "longest_edge": 500_000}}
    videos = QwenVideos.from_config(config, counts_all=True)
    expected = smart_resize(*size, factor=32, min_pixels=65536, max_pixels=500_000)
    assert videos.fitting_size(*size) == expected


def test_frame_times_follow_from_the_frame_rate() -> None:
    frames = Frames(np.zeros((3, 1, 1, 3), np.uint8), fps=2.0)
    assert frames.seconds(2) == (0.25, 1.0)
    assert frames.sampled_fps == 2.0


def test_prepared_media_count_their_tokens(media: MediaRenderer) -> None:
    video = media.video(Frames(np.zeros((4, 56, 56, 3), np.uint8)))
    assert isinstance(video, PreparedMedia)
    [item] = video.items
    assert video.num_tokens == item.num_tokens == int(np.prod(item.grid)) // 4
    assert item.seconds_per_grid == pytest.approx(2 / 24)
