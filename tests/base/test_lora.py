"""Settings of adapters: their ranges, and `--lora-modules` in both forms."""

from typing import Any

import pytest

from quire.base.errors import ConfigError
from quire.base.settings.config import ServerConfig, config_from_flat
from quire.base.settings.lora import LoraConfig, LoraModule, is_name, parse_modules


def test_max_cpu_loras_defaults_to_max_loras() -> None:
    assert LoraConfig(max_loras=3).num_held == 3
    assert LoraConfig(max_loras=3, max_cpu_loras=9).num_held == 9
    assert LoraConfig(max_lora_rank=64).usable_rank == 0
    assert LoraConfig(enable_lora=True, max_lora_rank=64).usable_rank == 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_lora_rank": 257}, "from 1 to 256"),
        ({"max_lora_rank": 0}, "from 1 to 256"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "at least max_loras=4"),
        ({"lora_target_modules": ("q_proj", "")}, "names of modules"),
        ({"enable_lora": True, "pipeline_parallel_size": 2}, "stages"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_flat(**settings)


def test_targets_match_name_suffixes_and_experts_need_their_own_target() -> None:
    some = LoraConfig(lora_target_modules=("q_proj", "mlp.up_proj"))
    assert some.may_change("model.layers.0.self_attn.q_proj") and some.may_change("q_proj")
    assert some.may_change("layers.0.mlp.up_proj")
    for other in ("layers.0.self_attn.k_proj", "layers.0.up_proj", "layers.0.xq_proj"):
        assert not some.may_change(other)
    expert = "layers.0.mlp.experts.3.gate_proj"
    assert LoraConfig().may_change(expert)
    assert not LoraConfig(lora_target_modules=("gate_proj",)).may_change(expert)
    assert LoraConfig(lora_target_modules=("experts",)).may_change(expert)
    assert LoraConfig(lora_target_modules=("experts",)).may_change("layers.0.mlp.experts")


def test_is_name_checks_names_of_adapters() -> None:
    assert all(map(is_name, ("sql", "org/name:2@v1.0+x", "a" * 128)))
    assert not any(map(is_name, ("", "a b", "a\n", "é" * 129, 3, None)))


def test_lora_modules_are_pairs_or_json() -> None:
    given = ("a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "demo"}')
    assert parse_modules(given) == [LoraModule("a", "/x=y"), LoraModule("b", "/z", "demo")]
    two = '[{"name": "b", "path": "/z"}, {"name": "c", "path": "/z"}]'
    assert [each.name for each in parse_modules((two,))] == ["b", "c"]
    for wrong in (
        "a",
        "=x",
        "a=",
        "a b=/x",
        '{"name": "a"}',
        "[1]",
        '{"name": 1}',
        "{",
        "[" * 9999,
    ):
        with pytest.raises(ConfigError, match="lora_modules must be"):
            ServerConfig(lora_modules=(wrong,))
    with pytest.raises(ConfigError, match="different names"):
        ServerConfig(lora_modules=("a=/x", "a=/y"))
    with pytest.raises(ConfigError, match="unknown fields"):
        ServerConfig(lora_modules=('{"name": "a", "path": "/x", "rank": 3}',))
