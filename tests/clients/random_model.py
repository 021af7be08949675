"""Models of random numbers. One has a small vocabulary, tools and reasoning as Qwen 3 writes them;
one reads images, as Qwen 2.5 VL does.

Their text is noise, so a formatted answer owes its format to the server. They reason only if
`enable_thinking` is set: then the template opens the reasoning.
"""

import json
import shutil
from pathlib import Path

import tokenizers

GOLDEN = Path(__file__).parents[1] / "render" / "golden" / "qwen3"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SEEING = CONFIG | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64,
        "num_heads": 2, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1],
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    },
}  # fmt: skip
SEEING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENING = """{%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}"""
ON_REQUEST = """{%- if enable_thinking is defined and enable_thinking -%}
        {{- '<think>\\n' -}}
    {%- else -%}
        {{- '<think>\\n\\n</think>\\n\\n' -}}"""


def write_random_model(folder: Path) -> None:
    """Write all but the weights, for `--load-format dummy`."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / name, folder)
    template = (GOLDEN / "chat_template.jinja").read_text("utf-8")
    assert template.count(OPENING) == 1
    (folder / "chat_template.jinja").write_text(template.replace(OPENING, ON_REQUEST), "utf-8")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    sizes = {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))


def write_seeing_model(folder: Path) -> None:
    """Write all but the weights of a model that reads images. 28 x 28 pixels are one token."""
    shutil.copy(GOLDEN / "tokenizer_config.json", folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(SEEING_TEMPLATE, "utf-8")
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    } | {name: tokenizer.token_to_id(t) for name, t in zip(names, VISION_TOKENS, strict=True)}
    (folder / "config.json").write_text(json.dumps(SEEING | ids))
    preprocessor = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 64}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
