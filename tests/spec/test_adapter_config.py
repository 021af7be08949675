"""adapter_config.json as PEFT writes it: the fields that are read or rejected."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import ModelError
from quire.spec.adapter_config import CONFIG, MAX_CONFIG_BYTES, AdapterConfig, read_adapter_config

# All fields that PEFT 0.17 writes for a linear adapter.
WRITTEN = {
    "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "base", "bias": "none",
    "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "layer_replication": None,
    "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16,
    "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA",
    "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None,
    "target_modules": ["q_proj", "v_proj"], "target_parameters": None, "task_type": "CAUSAL_LM",
    "trainable_token_indices": None, "use_dora": False, "use_qalora": False, "use_rslora": False,
}  # fmt: skip


def read(folder: Path, **changes: Any) -> AdapterConfig:
    (folder / CONFIG).write_text(json.dumps(WRITTEN | changes))
    return read_adapter_config(folder)


def test_scale_is_alpha_divided_by_rank(tmp_path: Path) -> None:
    assert read(tmp_path).scale_of("any", 8) == 2.0
    assert read(tmp_path, use_rslora=True).scale_of("any", 8) == 16 / math.sqrt(8)
    assert read(tmp_path, lora_alpha=0.5).scale_of("any", 1) == 0.5


def test_alpha_pattern_sets_the_alpha_of_single_modules(tmp_path: Path) -> None:
    own = {"^model.layers.1.self_attn.q_proj": 4, "q_proj": 32, "layers.0.mlp.up_proj$": 64}
    config = read(tmp_path, alpha_pattern=own)
    assert config.scale_of("model.layers.1.self_attn.q_proj", 8) == 0.5
    assert config.scale_of("model.layers.0.self_attn.q_proj", 8) == 4.0
    assert config.scale_of("model.layers.0.mlp.up_proj", 8) == 8.0
    assert config.scale_of("model.layers.10.mlp.up_proj", 8) == 2.0
    assert config.scale_of("model.layers.0.self_attn.kq_proj", 8) == 2.0


@pytest.mark.parametrize(
    "targets", ["all-linear", ".*_proj", ["q_proj"], ["model.layers.0.x"], None]
)
def test_target_modules_may_have_any_form(tmp_path: Path, targets: Any) -> None:
    assert read(tmp_path, target_modules=targets).alpha == 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_dora", True),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("modules_to_save", ["embed_tokens"]),
        ("bias", "all"),
        ("lora_bias", True),
        ("trainable_token_indices", [1]),
        ("target_parameters", "experts.gate_up_proj"),
        ("layer_replication", [[0, 1]]),
        ("use_qalora", True),
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("r", 0),
        ("r", 257),
        ("r", True),
        ("r", "8"),
        ("r", None),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("alpha_pattern", {"q_proj": -math.inf}),
        ("alpha_pattern", {"(a+)+$": 1}),
        ("alpha_pattern", {"q_proj" * 200: 1}),
        ("alpha_pattern", [1]),
    ],
)
def test_unsupported_fields_are_rejected_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name):
        read(tmp_path, **{name: value})


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", "[" * 100_000, " " * MAX_CONFIG_BYTES + "{}"]
)
def test_damaged_configs_are_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(ModelError, match=CONFIG):
        read_adapter_config(tmp_path)


def test_directory_without_a_config_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="give the directory of an adapter"):
        read_adapter_config(tmp_path)
