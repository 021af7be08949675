"""Checkpoints of Qwen3-VL's shape with random weights, as transformers writes them.

The vocabulary ends with the tokens of the chat template and of images. A picture whose sides are
multiples of 32 keeps its size.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks.cpu.checkpoints import DOCUMENTS, tokenizer_of
from benchmarks.cpu.images.workload import ImageShape, ImageWorkload

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
END, PADDING = "<|im_end|>", "<|endoftext|>"
SPECIAL = (PADDING, "<|im_start|>", END, VISION_START, VISION_END, IMAGE, VIDEO)
THETA = 5_000_000.0
MAX_LEN = 16384
# In a request for the chat template, a content is a list of parts.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def special_id(shape: ImageShape, text: str) -> int:
    """Return the id of a special token."""
    return shape.text.vocab_size - len(SPECIAL) + SPECIAL.index(text)


def text_config(shape: ImageShape) -> dict[str, Any]:
    text = shape.text
    rotation = {
        "rope_type": "default",
        "mrope_interleaved": True,
        "mrope_section": list(shape.sections),
    }
    return {
        "model_type": "qwen3_vl_text",
        "hidden_size": text.hidden,
        "intermediate_size": text.intermediate,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads,
        "head_dim": text.head_dim,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": THETA,
        "rope_scaling": rotation,
        "rope_parameters": rotation | {"rope_theta": THETA},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": special_id(shape, PADDING),
        "eos_token_id": special_id(shape, END),
        "dtype": "bfloat16",
    }


def vision_config(shape: ImageShape) -> dict[str, Any]:
    tower = shape.tower
    return {
        "model_type": "qwen3_vl",
        "depth": tower.depth,
        "hidden_size": tower.width,
        "intermediate_size": tower.inner,
        "num_heads": tower.heads,
        "patch_size": tower.patch,
        "temporal_patch_size": tower.frames,
        "spatial_merge_size": tower.merge,
        "out_hidden_size": shape.text.hidden,
        "deepstack_visual_indexes": list(tower.deepstack),
        "num_position_embeddings": tower.num_positions,
        "in_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
    }


def config_of(shape: ImageShape) -> dict[str, Any]:
    """Return config.json, as transformers 4 and 5 read it."""
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": special_id(shape, IMAGE),
        "video_token_id": special_id(shape, VIDEO),
        "vision_start_token_id": special_id(shape, VISION_START),
        "vision_end_token_id": special_id(shape, VISION_END),
        "tie_word_embeddings": True,
        "text_config": text_config(shape),
        "vision_config": vision_config(shape),
        "dtype": "bfloat16",
    }


def preprocessor_of(shape: ImageShape) -> dict[str, Any]:
    """Return preprocessor_config.json."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "min_pixels": 65536,
        "max_pixels": 16777216,
        "patch_size": shape.tower.patch,
        "temporal_patch_size": shape.tower.frames,
        "merge_size": shape.tower.merge,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def files_of(shape: ImageShape) -> dict[str, Any]:
    """Return the contents of all JSON files of a checkpoint."""
    config, images = config_of(shape), preprocessor_of(shape)
    videos = {"image_processor_type": None, "video_processor_type": "Qwen3VLVideoProcessor"}
    return {
        "config.json": config,
        "preprocessor_config.json": images,
        "video_preprocessor_config.json": images | videos,
        "generation_config.json": {"eos_token_id": config["text_config"]["eos_token_id"]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": PADDING,
            "model_max_length": MAX_LEN,
            "chat_template": TEMPLATE,
        },
        "tokenizer.json": tokenizer_of(shape.text, SPECIAL),
    }


def weights_of(shape: ImageShape) -> dict[str, torch.Tensor]:
    """Return seeded normal weights in bfloat16 by the names that transformers' model has.

    A matrix keeps the variance of its inputs, so that the image decides the answer in any size.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config_of(shape)))
    made, tensors = torch.Generator().manual_seed(0), {}
    for name, empty in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        tensor = torch.empty(empty.shape, dtype=torch.bfloat16)
        if empty.dim() > 1:
            spread = (empty.numel() / len(empty)) ** -0.5
            tensors[name] = tensor.normal_(0.0, spread, generator=made)
        else:
            tensors[name] = tensor.fill_(float(name.endswith("weight")))
    return tensors


def write_checkpoint(shape: ImageShape, directory: Path) -> Path:
    """Write a checkpoint; nothing is done if the directory has this configuration already."""
    done, config = directory / "complete", directory / "config.json"
    if done.exists() and json.loads(config.read_text("utf-8")) == config_of(shape):
        return directory
    done.unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights_of(shape), directory / "model.safetensors", metadata={"format": "pt"})
    for name, content in files_of(shape).items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    done.touch()
    return directory


def prompt_text(workload: ImageWorkload, directory: Path) -> str:
    """Return the text that surrounds the images of a workload with as many tokens as it asks for.

    The two tokens around the image are not in the text.
    """
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    target = workload.num_text - 2
    words = DOCUMENTS[0].read_text("utf-8").split()
    for start in range(len(words)):
        for end in range(start + 1, start + target + 1):
            text = " ".join(words[start:end])
            num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
            if num_tokens == target:
                return text
            if num_tokens > target:
                break
    raise AssertionError(f"no text of {target} tokens")
