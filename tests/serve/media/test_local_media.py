"""Media in the prompts of a Python program, in all forms that vLLM accepts."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.base.errors import RequestError
from quire.render.media.prepared import PreparedMedia
from quire.render.renderer import Renderer
from quire.serve.media.local_media import LocalMedia
from tests.render.media.test_media_renderer import WorkerHere
from tests.render.media.test_processors import encoded, picture
from tests.support.render.tiny_tokenizers import (
    IMAGE_PART,
    renderer_of,
    text_part,
    write_vision_model,
)

PICTURE = picture(40, 30)
FILE = encoded(PICTURE)
DATA_URL = "data:image/png;base64," + base64.b64encode(FILE).decode()
PIXELS = np.asarray(PICTURE)
FRAMES = np.stack([np.asarray(picture(40, 30, seed)) for seed in range(4)])


@pytest.fixture
def renderer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Renderer:
    renderer = renderer_of(write_vision_model(tmp_path / "model", "qwen2_vl"))
    assert renderer.media is not None
    monkeypatch.setattr(renderer.media, "_pool", WorkerHere())
    return renderer


@pytest.fixture
def local(renderer: Renderer, tmp_path: Path) -> LocalMedia:
    (tmp_path / "a b.png").write_bytes(FILE)
    return LocalMedia(renderer, str(tmp_path))


def expected(renderer: Renderer) -> PreparedMedia:
    assert renderer.media is not None
    return renderer.media.image(PIXELS)


PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "low"}},
    {"type": "image_url", "image_url": DATA_URL},
    {"type": "input_image", "image_url": DATA_URL},
    {"image_url": {"url": DATA_URL}},
    {"type": "image_pil", "image_pil": PICTURE},
    {"type": "image", "image": PIXELS},
    {"type": "image", "image": FILE},
]


@pytest.mark.parametrize("part", PARTS)
def test_image_parts_of_messages_become_media(
    local: LocalMedia, renderer: Renderer, part: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": [text_part("look"), part]},
                {"role": "assistant", "content": "yes"}]  # fmt: skip
    for prompt, media in (local.take(messages), asyncio.run(local.take_async(messages))):
        assert media == [expected(renderer)]
        assert prompt == [{"role": "user", "content": [text_part("look"), IMAGE_PART]}, messages[1]]
        assert renderer.render(prompt, media=media).media
    assert messages[0]["content"][1] is part  # the caller's messages are unchanged


def test_files_are_read_by_path_and_by_url(
    local: LocalMedia, renderer: Renderer, tmp_path: Path
) -> None:
    for name in (str(tmp_path / "a b.png"), (tmp_path / "a b.png").as_uri()):
        _, media = local.take([{"role": "user", "content": [{"type": "image", "image": name}]}])
        assert media == [expected(renderer)]


@pytest.mark.parametrize(
    "data",
    [{"image": PICTURE}, {"image": [PIXELS]}, {"image": PIXELS, "video": None}],
)
def test_multi_modal_data_of_prompts_becomes_media(
    local: LocalMedia, renderer: Renderer, data: dict[str, Any]
) -> None:
    for given in ({"prompt": "a <|image_pad|>"}, {"prompt_token_ids": [1, 2]}):
        prompt = {**given, "cache_salt": "s", "multi_modal_data": data}
        assert local.take(prompt) == ({**given, "cache_salt": "s"}, [expected(renderer)])


@pytest.mark.parametrize(
    "frames",
    [FRAMES, [FRAMES], list(FRAMES), [picture(40, 30, seed) for seed in range(4)],
     (FRAMES, {"fps": 24.0, "frames_indices": [0, 1, 2, 3], "total_num_frames": 4})],
)  # fmt: skip
def test_all_video_forms_give_the_same_media(local: LocalMedia, frames: Any) -> None:
    _, [video] = local.take({"prompt": "", "multi_modal_data": {"video": frames}})
    _, [same] = local.take({"prompt": "", "multi_modal_data": {"video": FRAMES}})
    assert video == same and video.items[0].grid[0] == 2


def test_text_prompts_are_returned_unchanged(local: LocalMedia) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "user", "content": [text_part("a")]}]
    for prompt in ("hi", [1, 2], {"prompt": "hi"}, messages):
        assert local.take(prompt) == (prompt, [])
        assert local.take(prompt)[0] is prompt


WRONG: list[tuple[Any, str]] = [
    ({"image": "http://example.org/a.png"}, r"image\[0\]: the URL begins with 'http'"),
    ({"image": "/etc/hostname"}, "no readable file below the folder"),
    ({"image": PIXELS.astype(np.float32)}, r"uint8 array \[H, W, 3\], got ndarray of float32"),
    ({"image": PIXELS[..., :2]}, r"\[30, 40, 2\]"),
    ({"image": PIXELS[:0]}, r"\[0, 40, 3\]"),
    ({"image": [PIXELS, b"hello"]}, "none of the formats"),
    ({"audio": 1}, "'audio', which is not supported"),
    ({"video": "a.mp4"}, "files of videos are not decoded"),
    ({"video": [[]]}, "at least one frame"),
    ({"video": (FRAMES, {"fps": -1})}, "fps must be positive"),
    ({"video": (FRAMES, {"frames_indices": [1]})}, "for each of the 4 frames, got 1"),
    ({"video": (FRAMES, 3)}, "a pair must hold frames"),
    ([PIXELS], "must be an object, got list"),
]


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_invalid_media_are_rejected(local: LocalMedia, data: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        local.take({"prompt": "x", "multi_modal_data": data})


def test_truncated_image_file_is_rejected(local: LocalMedia) -> None:
    broken = Image.open(io.BytesIO(FILE[: len(FILE) // 2]))
    with pytest.raises(RequestError, match=r"image\[0\]: the picture cannot be read"):
        local.take({"prompt": "x", "multi_modal_data": {"image": broken}})


def test_local_files_need_an_allowed_folder(renderer: Renderer, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(FILE)
    part = {"type": "image", "image": str(tmp_path / "a.png")}
    with pytest.raises(RequestError, match=r"messages\[0\].content\[0\]: file: URLs are not"):
        LocalMedia(renderer).take([{"role": "user", "content": [part]}])
    with pytest.raises(RequestError, match=r"content\[0\] has no image"):
        LocalMedia(renderer).take([{"role": "user", "content": [{"type": "image"}]}])


def test_models_without_vision_tower_reject_images(renderer: Renderer) -> None:
    local = LocalMedia(Renderer(renderer.tokenizer))
    for prompt in (
        {"prompt": "x", "multi_modal_data": {"image": PICTURE}},
        [{"role": "user", "content": [PARTS[0]]}],
    ):
        with pytest.raises(RequestError, match="this model does not accept images"):
            local.take(prompt)
