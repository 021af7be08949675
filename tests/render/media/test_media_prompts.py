"""Prompts with images have the token ids that transformers' processors give."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from quire.base.errors import RequestError
from quire.render.media.placeholders import Placeholder, Placeholders
from quire.render.media.prepared import PreparedMedia, media_item
from quire.render.media.processor import ProcessedImage
from quire.render.media.videos import Frames
from quire.render.renderer import RenderedPrompt, Renderer
from quire.render.templates.chat_template import ChatOptions
from quire.render.tokens.tokenizer import Tokenizer
from quire.render.tokens.tokenizer_files import TokenizerFiles
from quire.render.truncation import truncated
from tests.render.media.test_processors import picture
from tests.support.render.tiny_tokenizers import (
    BUILDERS,
    IMAGE_PART,
    VISION_CONFIGS,
    VISION_NAMES,
    renderer_of,
    text_part,
    vision_backend,
    write_vision_model,
)

QWEN = {
    "qwen2_vl": Qwen2VLProcessor, "qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor
}  # fmt: skip
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {
        "role": "user",
        "content": [text_part("ab\n"), IMAGE_PART, text_part("\n\nand"), IMAGE_PART, IMAGE_PART],
    },
    {"role": "assistant", "content": "three\n"},
    {"role": "tool", "content": [text_part("a chart"), IMAGE_PART]},
    {"role": "user", "content": [IMAGE_PART, text_part("and this?")]},
]
PICTURES = [
    picture(70, 50),
    picture(30, 90, 1),
    picture(64, 64, 2),
    picture(130, 40, 3),
    picture(28, 28),
]


VIDEO = {"type": "video"}
NUM_CROPS = 5  # of two pictures; the remaining ones are too square or too narrow


def theirs(model_type: str, config: dict[str, Any]) -> Any:
    """Return the processor of transformers."""
    own = VISION_NAMES.get(model_type, {})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vision_backend(model_type), extra_special_tokens=own
    )
    if model_type == "gemma3":
        images = Gemma3ImageProcessorPil(**config)
        return Gemma3Processor(images, tokenizer, image_seq_length=4)
    if model_type == "llava":
        return LlavaProcessor(LlavaImageProcessorPil(**config), tokenizer, 14, "full")
    if model_type == "llava_next":
        return LlavaNextProcessor(LlavaNextImageProcessorPil(**config), tokenizer, 14, "full")

    class WithoutVideos(QWEN[model_type]):  # type: ignore[name-defined,misc]
        """The processor without its check of the video processor, which needs torchvision."""

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return type(argument)

    videos = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    return WithoutVideos(Qwen2VLImageProcessorPil(**config), tokenizer, videos)


def prepared(renderer: Renderer, pictures: Sequence[Image.Image]) -> list[PreparedMedia]:
    assert renderer.media is not None
    return [renderer.media.image(np.asarray(each)) for each in pictures]


def rendered(renderer: Renderer, pictures: Sequence[Image.Image] = PICTURES) -> RenderedPrompt:
    return renderer.render(CONVERSATION, media=prepared(renderer, pictures))


def check_spans(prompt: RenderedPrompt, token_id: int | None) -> None:
    """Check that the items cover exactly the placeholder tokens."""
    covered = {index for item in prompt.media for index in range(item.start, item.end)}
    assert covered == {i for i, each in enumerate(prompt.token_ids) if each == token_id}
    assert sum(item.num_tokens for item in prompt.media) == len(covered)
    assert list(prompt.media) == sorted(prompt.media, key=lambda item: item.start)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [*((model_type, {}) for model_type in VISION_CONFIGS), ("gemma3", {"do_pan_and_scan": True})],
)
def test_token_ids_equal_those_of_transformers(
    tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    renderer = renderer_of(write_vision_model(tmp_path, model_type, changes))
    ours = rendered(renderer)
    assert ours.text == renderer.chat_text(CONVERSATION)
    processor = theirs(model_type, VISION_CONFIGS[model_type] | changes)
    if changes:  # Gemma3Processor reads these only from the call
        changes = changes | {"pan_and_scan_min_crop_size": 32}
    expected = processor(text=[ours.text], images=PICTURES, add_special_tokens=False, **changes)
    assert ours.token_ids == list(expected["input_ids"][0])
    token = {"gemma3": "<image_soft_token>", "llava": "<image>", "llava_next": "<image>"}
    assert renderer.tokenizer is not None
    check_spans(ours, renderer.tokenizer.token_id(token.get(model_type, "<|image_pad|>")))
    assert len(ours.media) == len(PICTURES) + (NUM_CROPS if changes else 0)
    assert all(item.is_whole == (model_type == "gemma3") for item in ours.media)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_token_ids_of_videos_equal_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    renderer = renderer_of(write_vision_model(tmp_path, model_type))
    assert renderer.media is not None and renderer.tokenizer is not None
    pixels = np.stack([np.asarray(picture(64, 40, seed)) for seed in range(5)])
    video = renderer.media.video(Frames(pixels, fps=4.0, indices=(0, 4, 8, 12, 16), total=20))
    conversation = [{"role": "user", "content": [IMAGE_PART, VIDEO, text_part("what is it?")]}]
    media = [video, *prepared(renderer, PICTURES[:1])]
    ours = renderer.render(conversation, media=media)
    assert ours.text is not None
    processor = theirs(model_type, VISION_CONFIGS[model_type])
    grid = np.array([[len(video.items), *video.items[0].grid[1:]]])
    if model_type == "qwen2_5_vl":
        grid = np.array([video.items[0].grid])
        assert video.items[0].seconds_per_grid == 2.0
    facts = VideoMetadata(total_num_frames=20, fps=4.0, frames_indices=[0, 4, 8, 12, 16])
    writes = processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [facts]}, 0)
    image = processor.image_token * ours.media[0].num_tokens
    [text], _ = processor.get_text_with_replacements([ours.text], [image], [writes])
    assert ours.token_ids == renderer.tokenizer.encode(text, add_special_tokens=False)
    assert [item.kind for item in ours.media] == ["image"] + ["video"] * len(video.items)
    assert sum(item.grid[0] for item in ours.media[1:]) == 3


@pytest.mark.parametrize("model_type", ["qwen2_vl", "llava"])
def test_marks_in_token_ids_are_expanded_as_in_text(tmp_path: Path, model_type: str) -> None:
    renderer = renderer_of(write_vision_model(tmp_path, model_type))
    from_text = rendered(renderer)
    assert renderer.tokenizer is not None and from_text.text is not None
    marked = renderer.tokenizer.encode(from_text.text, add_special_tokens=False)
    from_ids = renderer.render({"prompt_token_ids": marked}, media=prepared(renderer, PICTURES))
    assert (from_ids.token_ids, from_ids.media) == (from_text.token_ids, from_text.media)
    assert renderer.render(marked).token_ids == marked  # without media, marks stay as they are


def test_gemma_marks_in_token_ids_become_complete_placeholders(tmp_path: Path) -> None:
    renderer = renderer_of(write_vision_model(tmp_path, "gemma3"))
    assert renderer.tokenizer is not None
    text = "ab<start_of_image>"
    marked = renderer.tokenizer.encode(text)
    media = prepared(renderer, PICTURES[:1])
    assert renderer.render(marked, media=media).token_ids == (
        renderer.render(text, media=media).token_ids
    )


def test_digests_differ_between_images_and_model_families(tmp_path: Path) -> None:
    digests = set()
    for model_type in VISION_CONFIGS:
        renderer = renderer_of(write_vision_model(tmp_path, model_type))
        first, again = rendered(renderer), rendered(renderer)
        assert [item.digest for item in first.media] == [item.digest for item in again.media]
        digests |= {item.digest for item in first.media}
        assert all(len(item.digest) == 32 for item in first.media)
    assert len(digests) == len(VISION_CONFIGS) * len(PICTURES)


@pytest.mark.parametrize("family", ["byte_level", "llama", "gemma", "metaspace"])
@pytest.mark.parametrize("strips", [{}, {"lstrip": True, "rstrip": True}])
def test_expanded_ids_equal_the_ids_of_repeated_placeholders(
    family: str, strips: dict[str, bool]
) -> None:
    backend = BUILDERS[family]()
    backend.add_tokens([AddedToken("<image>", **{"normalized": False, **strips})])
    tokenizer = Tokenizer(backend, TokenizerFiles(Path()))
    placeholders = Placeholders({"image": Placeholder("<image>", "<image>")}, tokenizer)
    square = ProcessedImage(np.zeros((1, 1, 3), np.uint8), np.zeros((3, 256), np.float32), (), 5)
    media = [PreparedMedia("image", (media_item(square, "llava"),))] * 3
    text = "<image>The quick <image> brown\n<image>"
    expanded, ordered = placeholders.expand(text, media)
    token_ids, _ = placeholders.place(tokenizer.encode(expanded), ordered)
    assert token_ids == tokenizer.encode(text.replace("<image>", "<image>" * 5))


def test_digest_covers_everything_but_the_position() -> None:
    pixels, table = np.zeros((2, 2, 3), np.uint8), np.zeros((3, 256), np.float32)
    image = ProcessedImage(pixels, table, (1, 2), 4)
    changed = [
        replace(image, pixels=pixels + np.uint8(1)), replace(image, table=table + 1),
        replace(image, pixels=pixels.reshape(4, 1, 3)), replace(image, grid=(2, 1)),
        replace(image, num_tokens=5),
    ]  # fmt: skip
    items = [media_item(each, "llava") for each in (image, *changed)]
    items += [
        media_item(image, "gemma3"), media_item(image, "llava", "video"),
        media_item(image, "llava", seconds_per_grid=1.0), media_item(image, "llava", is_whole=True),
    ]  # fmt: skip
    assert len({item.digest for item in items}) == len(items)
    assert media_item(image, "llava").at(7).digest == items[0].digest


TYPED = [
    ("qwen2_vl", "<|image_pad|>"), ("qwen2_vl", "<|video_pad|>"), ("llava", "<image>"),
    ("gemma3", "<start_of_image>"), ("gemma3", "<image_soft_token>"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "token"), TYPED)
def test_placeholders_in_the_text_of_a_client_are_rejected(
    tmp_path: Path, model_type: str, token: str
) -> None:
    renderer = renderer_of(write_vision_model(tmp_path, model_type))
    [media] = prepared(renderer, PICTURES[:1])
    message = {"role": "user", "content": [text_part(f"look: {token}"), IMAGE_PART]}
    with pytest.raises(RequestError, match=r"messages\[0\] has the text") as caught:
        renderer.render([message], media=[media])
    assert caught.value.field == "messages[0]" and token in str(caught.value)
    with pytest.raises(RequestError, match="stands for an image"):
        renderer.render([{"role": "user", "content": token}])
    # A placeholder that the template joins from two parts is found by its count.
    halves = [text_part(token[:4]), text_part(token[4:])]
    with pytest.raises(RequestError, match="the number of placeholders|the prompt has the text"):
        renderer.render([{"role": "user", "content": [*halves, IMAGE_PART]}], media=[media])
    with pytest.raises(RequestError, match="the number of placeholders|the prompt has the text"):
        renderer.render(f"look: {token}")


def test_prompt_must_have_one_placeholder_per_image(tmp_path: Path) -> None:
    renderer = renderer_of(write_vision_model(tmp_path, "qwen2_vl"))
    media = prepared(renderer, PICTURES[:2])
    assert renderer.tokenizer is not None
    mark_ids = renderer.tokenizer.encode("ab<|image_pad|>")
    with pytest.raises(RequestError, match="prompt is 1, .*number of its images is 2"):
        renderer.render([{"role": "user", "content": [IMAGE_PART]}], media=media)
    with pytest.raises(RequestError, match="prompt is 3, .*images is 2"):
        renderer.render("<|image_pad|>" * 3, media=media)
    with pytest.raises(RequestError, match="prompt is 1, .*number of its images is 2"):
        renderer.render(mark_ids, media=media)
    text_only = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(RequestError, match="takes only text"):
        message = {"role": "user", "content": [IMAGE_PART, text_part("ab")]}
        renderer.render([message], template=text_only, media=media[:1])
    drops = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="prompt is 0, .*images is 1"):
        renderer.render([message], template=drops, media=media[:1])


def test_models_without_a_vision_tower_reject_images(tmp_path: Path) -> None:
    own = renderer_of(write_vision_model(tmp_path, "llava"))
    media = prepared(own, PICTURES[:1])
    renderer = Renderer(own.tokenizer)
    for prompt in ([{"role": "user", "content": [IMAGE_PART]}], "<image>", [1, 2]):
        with pytest.raises(RequestError, match="this model does not accept images"):
            renderer.render(prompt, media=media)
    with pytest.raises(RequestError, match="this model does not accept videos; it accepts images"):
        own.render([{"role": "user", "content": [VIDEO]}], media=media)
    assert renderer.render("<image>").media == ()  # plain text for this model


def test_truncation_that_would_cut_a_prompt_with_images_is_rejected(tmp_path: Path) -> None:
    prompt = rendered(renderer_of(write_vision_model(tmp_path, "llava")))
    assert truncated(prompt, len(prompt.token_ids), 0) is prompt
    with pytest.raises(RequestError, match="would cut a prompt with images"):
        truncated(prompt, 5, 0)


def test_final_message_to_continue_must_end_with_text(tmp_path: Path) -> None:
    renderer = renderer_of(write_vision_model(tmp_path, "qwen2_vl"))
    options = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    message = {"role": "user", "content": [text_part("ab"), IMAGE_PART]}
    with pytest.raises(RequestError, match="ends with text"):
        renderer.chat_text([message], options)
