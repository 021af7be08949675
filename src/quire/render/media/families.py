"""The placeholders of the built-in families, as transformers' processors write them."""

from collections.abc import Mapping
from typing import Any

from quire.render.media.model_files import QWEN, QWEN3
from quire.render.media.placeholders import Placeholder
from quire.render.media.prepared import IMAGE, VIDEO, PreparedMedia
from quire.render.media.processor import ProcessedImage
from quire.render.media.processors import LLAVA


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
    """An image, then its crops if there are any. Tokens of an image see each other."""
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
