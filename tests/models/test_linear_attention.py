"""Layers with linear attention: what is loaded, and what a config says of them.

Covers `base/linear_attention.py`; test_architectures.py has their numbers.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.cache_group import FULL, STATE, CacheGroup
from quire.base.errors import ModelError
from quire.base.model_spec import load_spec, parse_spec
from quire.models.gated_attention import gates_first
from quire.models.linear_attention import DeltaRule, rows_of_key_heads
from quire.models.loading import LoadOptions, load_model
from tests.models.checkpoints import HYBRID, HYBRID_EXPERTS, write_checkpoint
from tests.models.paged import CPU, run_paged

WEIGHTS = "model.safetensors"
TOKENS = [list(range(3, 40))]


def spec_of(**changes: Any) -> Any:
    spec = parse_spec({"model_type": "qwen3_5_text"} | HYBRID | changes)
    spec.check()
    return spec


def rule_of(model: torch.nn.Module) -> DeltaRule:
    return next(module for module in model.modules() if isinstance(module, DeltaRule))


def test_groups_are_those_of_the_layers_kinds() -> None:
    # 2 * 2 * 8 + 4 * 6 channels, 3 inputs of each; 4 heads with 8 x 6 numbers
    assert spec_of().cache_groups == (
        CacheGroup(FULL, (3,), num_kv_heads=2, head_dim=16),
        CacheGroup(STATE, (0, 1, 2), state_size=56 * 3 + 4 * 8 * 6),
    )
    assert spec_of(full_attention_interval=2).linear_layers == (0, 2)
    kinds = ["full_attention", "linear_attention"] * 2
    assert spec_of(layer_types=kinds).linear_layers == (1, 3)
    (whole,) = spec_of(full_attention_interval=1).cache_groups
    assert whole.kind == FULL


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"layer_types": ["linear_attention"] * 4},
            "layer_types is .* none of 4 layers .* attend",
        ),
        ({"full_attention_interval": 5}, "full_attention_interval is 5; none of 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "supported are full_.* and linear_attention"),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads is 3; .* no multiple of 2 key",
        ),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported are silu, swish"),
        ({"attn_output_gate": False}, "attn_output_gate is false; attention of .* has a gate"),
        ({"sliding_window": 6}, "sliding_window is 6; qwen3_5_text has no windows"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(**change)


def test_experts_in_all_layers_have_no_switches() -> None:
    raw = {"model_type": "qwen3_5_moe_text"} | HYBRID_EXPERTS
    spec = parse_spec(raw | {"norm_topk_prob": False, "mlp_only_layers": [0]})
    assert spec.experts is not None
    assert spec.experts.normalises and spec.experts.is_sparse(0)
    with pytest.raises(ModelError, match="num_experts is 0; qwen3_5_moe_text has experts in all"):
        parse_spec(raw | {"num_experts": 0}).check()


def test_decays_keep_32_bits_in_a_model_of_16(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3_5")
    rule = rule_of(load_model(tmp_path, checkpoint.spec, torch.bfloat16, CPU))
    stored = load_file(tmp_path / WEIGHTS)
    name = "model.layers.0.linear_attn"
    torch.testing.assert_close(rule.rate.data, stored[f"{name}.A_log"].exp())
    assert torch.equal(rule.shift.data, stored[f"{name}.dt_bias"])
    convolution = stored[f"{name}.conv1d.weight"].bfloat16()
    assert torch.equal(rule.convolution.data, convolution[:, 0])


def test_a_model_without_a_checkpoint_forgets(tmp_path: Path) -> None:
    """Random decays could grow without bound."""
    spec = write_checkpoint(tmp_path, "qwen3_next").spec
    model = load_model(tmp_path, spec, torch.float32, CPU, LoadOptions(load_format="dummy"))
    rule = rule_of(model)
    assert (rule.rate.unique(), rule.norm.unique(), rule.shift.unique()) == (1, 1, 0)
    assert run_paged(model, spec, TOKENS, [[30, 7]])[0].isfinite().all()


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_tensors_of_a_part_that_guesses_more_tokens_are_ignored(
    variant: str, tmp_path: Path
) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    tensors = load_file(tmp_path / WEIGHTS)
    guessing = {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.mlp.gate.weight": torch.ones(1)}
    save_file(tensors | guessing, tmp_path / WEIGHTS, {"format": "pt"})
    load_model(tmp_path, load_spec(tmp_path), torch.float32, CPU)
    save_file(tensors | {"ntp.fc.weight": torch.ones(2)}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match="hold unknown tensors .ntp.fc.weight"):
        load_model(tmp_path, spec, torch.float32, CPU)


def test_orders_of_rows() -> None:
    # of each of two key heads: a query, a key, two values
    assert rows_of_key_heads((2, 2, 4), 2).tolist() == [0, 4, 1, 5, 2, 3, 6, 7]
    # of each of two heads of two dimensions: a query, a gate
    assert gates_first(2, 2, torch.tensor([1, 0])).tolist() == [2, 3, 6, 7, 1, 0, 5, 4]
