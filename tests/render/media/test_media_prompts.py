"""Prompts with images have the token ids that transformers' processors give."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

from quire.render.media.media_renderer import MediaRenderer
from quire.render.renderer import RenderedPrompt, Renderer
from quire.render.tokenizer import Tokenizer
from tests.render.media.test_processors import picture

QWEN_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
GEMMA_TEMPLATE = (
    "<bos>{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is string %}"
    "{{ m.content | trim }}{% else %}{% for p in m.content %}{% if p.type == 'image' %}"
    "<start_of_image>{% else %}{{ p.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "<end_of_turn>\n{% endfor %}"
)
LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}: {% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<image>\n{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %} {% endfor %}"
)
QWEN = {"min_pixels": 784, "max_pixels": 28 * 28 * 16}
GEMMA = {"size": {"height": 56, "width": 56}, "image_seq_length": 4,
         "pan_and_scan_min_crop_size": 32}  # fmt: skip
NEXT = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56},
        "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}  # fmt: skip
NAMES = {
    "gemma3": {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>",
               "eoi_token": "<end_of_image>"},
}  # fmt: skip
TOKENS = {
    "qwen2_vl": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
                 "<|image_pad|>", "<|video_pad|>"],
    "gemma3": ["<bos>", "<start_of_turn>", "<end_of_turn>", *NAMES["gemma3"].values()],
    "llava": ["<image>"],
}  # fmt: skip
FAMILY = {"qwen2_5_vl": "qwen2_vl", "qwen3_vl": "qwen2_vl", "llava_next": "llava"}
TEMPLATES = {"qwen2_vl": QWEN_TEMPLATE, "gemma3": GEMMA_TEMPLATE, "llava": LLAVA_TEMPLATE}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN, "qwen2_5_vl": QWEN, "qwen3_vl": QWEN | {"patch_size": 16},
    "gemma3": GEMMA, "llava": {"size": {"shortest_edge": 28},
                               "crop_size": {"height": 28, "width": 42}},
    "llava_next": NEXT,
}  # fmt: skip


def backend(model_type: str) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer that joins line breaks, as the models' own do."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    breaks = ["\u010a" * n for n in range(2, 7)]
    words = ["ab", *breaks]
    merges = [("a", "b"), *(("\u010a" * n, "\u010a") for n in range(1, 6))]
    vocab = {token: index for index, token in enumerate([*letters, *words])}
    found = tokenizers.Tokenizer(models.BPE(vocab, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    tokens = TOKENS[FAMILY.get(model_type, model_type)]
    found.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in tokens])
    return found


def write_model(folder: Path, model_type: str, preprocessor: dict[str, Any] | None = None) -> Path:
    """Write all files of a model but its weights."""
    folder.mkdir(exist_ok=True)
    backend(model_type).save(str(folder / "tokenizer.json"))
    config = {"model_type": model_type, "vision_config": {"patch_size": 14}}
    if model_type in ("llava", "llava_next"):
        config["vision_config"]["model_type"] = "siglip_vision_model"  # type: ignore[index]
        config["vision_feature_select_strategy"] = "full"
    files = {
        "config.json": config,
        "tokenizer_config.json": {
            "chat_template": TEMPLATES[FAMILY.get(model_type, model_type)],
            "extra_special_tokens": NAMES.get(model_type, {}),
        },
        "preprocessor_config.json": CONFIGS[model_type] | (preprocessor or {}),
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def renderer_of(folder: Path) -> Renderer:
    tokenizer = Tokenizer.from_directory(folder)
    return Renderer(tokenizer, media=MediaRenderer.from_directory(folder, tokenizer))


def theirs(model_type: str, config: dict[str, Any]) -> Any:
    """Return the processor of transformers."""
    own = NAMES.get(model_type, {})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend(model_type), extra_special_tokens=own
    )
    if model_type == "gemma3":
        images = Gemma3ImageProcessorPil(**config)
        return Gemma3Processor(images, tokenizer, image_seq_length=4)
    if model_type == "llava":
        return LlavaProcessor(LlavaImageProcessorPil(**config), tokenizer, 14, "full")
    if model_type == "llava_next":
        return LlavaNextProcessor(LlavaNextImageProcessorPil(**config), tokenizer, 14, "full")
    return QwenWithoutVideos(Qwen2VLImageProcessorPil(**config), tokenizer)


class QwenWithoutVideos(Qwen2VLProcessor):  # type: ignore[misc]
    """The processor without its check of the video processor, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return type(argument)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


IMAGE = {"type": "image"}
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [text_part("ab\n"), IMAGE, text_part("\n\nand"), IMAGE, IMAGE]},
    {"role": "assistant", "content": "three\n"},
    {"role": "user", "content": [IMAGE, text_part("and this?")]},
]
PICTURES = [picture(70, 50), picture(30, 90, 1), picture(64, 64, 2), picture(130, 40, 3)]


def rendered(renderer: Renderer, pictures: Sequence[Image.Image]) -> RenderedPrompt:
    assert renderer.media is not None
    media = [renderer.media.image(np.asarray(each)) for each in pictures]
    return renderer.render(CONVERSATION, media=media)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_token_ids_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    renderer = renderer_of(write_model(tmp_path, model_type))
    ours = rendered(renderer, PICTURES)
    assert ours.text == renderer.chat_text(CONVERSATION)
    processor = theirs(model_type, CONFIGS[model_type])
    expected = processor(text=[ours.text], images=PICTURES, add_special_tokens=False)
    assert ours.token_ids == list(expected["input_ids"][0])
