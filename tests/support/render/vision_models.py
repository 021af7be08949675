"""Models that take images, without weights: tiny tokenizers, chat templates, settings."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire.render.media.media_renderer import MediaRenderer
from quire.render.renderer import Renderer
from quire.render.tokenizer import Tokenizer

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


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


IMAGE = {"type": "image"}
