"""Reading config.json: shapes, windows, cache groups.

Covers `spec/layer_windows.py` and `spec/model_options.py`.
"""

from pathlib import Path

import pytest

from quire.base.errors import ModelError
from quire.spec.model_spec import load_spec, parse_spec

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "eos_token_id": [1, 2],
    "torch_dtype": "bfloat16",
}


def test_llama_config_is_read() -> None:
    spec = parse_spec(LLAMA)
    assert (spec.head_dim, spec.num_kv_heads, spec.eos_token_ids) == (8, 2, (1, 2))
    (group,) = spec.cache_groups
    assert (group.kind, group.layers) == ("full", (0, 1, 2, 3))
    assert group.block_bytes(16, 2) == 2 * 4 * 2 * 8 * 2 * 16
    assert spec.kv_bytes_per_token(2) == 2 * 4 * 2 * 8 * 2


def test_gpt2_field_names_are_read() -> None:
    spec = parse_spec(
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 9,
         "n_positions": 64, "n_inner": None}
    )  # fmt: skip
    assert (spec.num_layers, spec.intermediate_size, spec.num_kv_heads) == (2, 128, 4)
    assert (spec.max_position, spec.tie_embeddings) == (64, True)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 7}, (7, 7, 7, 7)),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": False}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 7, "use_sliding_window": True,
             "max_window_layers": 3},
            (None, None, None, 7),
        ),
        (
            {"model_type": "qwen3", "sliding_window": 7, "use_sliding_window": True,
             "layer_types": ["sliding_attention", "full_attention"] * 2},
            (7, None, 7, None),
        ),
    ],
)  # fmt: skip
def test_layer_windows_of_each_model_type(changes: dict, windows: tuple) -> None:
    assert parse_spec(LLAMA | changes).layer_windows == windows


def test_layers_with_the_same_window_form_a_cache_group() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    windows = {"sliding_window": 7, "use_sliding_window": True, "layer_types": types}
    spec = parse_spec(LLAMA | {"model_type": "qwen3"} | windows)
    full, window = spec.cache_groups
    assert (full.kind, full.layers) == ("full", (1, 3))
    assert (window.kind, window.layers, window.window) == ("window", (0, 2), 7)


def test_errors_name_the_missing_file_or_field(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        load_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_spec(tmp_path)
    with pytest.raises(ModelError, match="model_type"):
        parse_spec({})
    with pytest.raises(ModelError, match="num_hidden_layers"):
        parse_spec({"model_type": "llama"})
