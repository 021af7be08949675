"""A model of random numbers: a small vocabulary, tools and reasoning as Qwen 3 writes them.

It says nothing that makes sense, so an answer that has a form has it by the server's doing. It
reasons only if `enable_thinking` asks for it: then the template opens the reasoning.
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
