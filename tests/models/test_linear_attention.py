"""Layers with linear attention: their configs, and their weights.

Covers `spec/linear_attention.py`, `spec/gguf/families.py` and `models/gguf/value_heads.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.base.errors import ModelError
from quire.models.checkpoint.formats import AS_THEY_ARE, IN_THE_DTYPE
from quire.models.load.loading import LoadOptions, load_model
from quire.models.parts.linear_attention import DeltaRule, LinearAttentionLayer, rows_of_key_heads
from quire.models.qwen.qwen3_next import gates_first
from quire.models.registry import model_spec
from quire.ops.host.native import core
from quire.ops.weights.packed import PackedWeight
from quire.spec.cache_group import FULL, STATE, CacheGroup
from quire.spec.model_spec import load_spec, parse_spec
from quire.tools.verify.weights import take_dequantised
from tests.support.models.checkpoints import HYBRID, HYBRID_EXPERTS, write_checkpoint, write_own
from tests.support.models.gguf_writer import Q8_0, convert
from tests.support.models.paged_forward import CPU, run_paged

WEIGHTS = "model.safetensors"
TOKENS = [list(range(3, 40))]


def spec_of(**changes: Any) -> Any:
    spec = parse_spec({"model_type": "qwen3_5_text"} | HYBRID | changes)
    spec.check()
    return spec


def rule_of(model: torch.nn.Module) -> DeltaRule:
    return next(module for module in model.modules() if isinstance(module, DeltaRule))


def output_of(model: torch.nn.Module) -> Any:
    """Return the output weight of the first layer with linear attention."""
    layers = (module for module in model.modules() if isinstance(module, LinearAttentionLayer))
    return next(layers).output.weight


def test_cache_groups_follow_the_kinds_of_layers() -> None:
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
            "layer_types is .* none of 4 layers .* uses",
        ),
        ({"full_attention_interval": 5}, "full_attention_interval is 5; none of 4 layers"),
        ({"layer_types": ["sliding_attention"] * 4}, "supported are full_.* and linear_attention"),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads is 3; .* not a multiple of 2 key",
        ),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported are silu, swish"),
        ({"attn_output_gate": False}, "attn_output_gate is false; attention of .* has a gate"),
        ({"sliding_window": 6}, "sliding_window is 6; qwen3_5_text has no windows"),
    ],
)
def test_invalid_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_of(**change)


def test_qwen3_5_moe_always_has_normalised_experts_in_all_layers() -> None:
    raw = {"model_type": "qwen3_5_moe_text"} | HYBRID_EXPERTS
    spec = parse_spec(raw | {"norm_topk_prob": False, "mlp_only_layers": [0]})
    assert spec.experts is not None
    assert spec.experts.normalises and spec.experts.is_sparse(0)
    with pytest.raises(ModelError, match="num_experts is 0; qwen3_5_moe_text has experts in all"):
        parse_spec(raw | {"num_experts": 0}).check()


def test_decays_stay_float32_in_a_bfloat16_model(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3_5")
    rule = rule_of(load_model(tmp_path, checkpoint.spec, torch.bfloat16, CPU))
    stored = load_file(tmp_path / WEIGHTS)
    name = "model.layers.0.linear_attn"
    torch.testing.assert_close(rule.rate.data, stored[f"{name}.A_log"].exp())
    assert torch.equal(rule.shift.data, stored[f"{name}.dt_bias"])
    convolution = stored[f"{name}.conv1d.weight"].bfloat16()
    assert torch.equal(rule.convolution.data, convolution[:, 0])


def test_dummy_weights_have_bounded_decays(tmp_path: Path) -> None:
    """Random decays could grow without bound."""
    spec = write_checkpoint(tmp_path, "qwen3_next").spec
    model = load_model(tmp_path, spec, torch.float32, CPU, LoadOptions(load_format="dummy"))
    rule = rule_of(model)
    assert (rule.rate.unique(), rule.norm.unique(), rule.shift.unique()) == (1, 1, 0)
    assert run_paged(model, spec, TOKENS, [[30, 7]])[0].isfinite().all()


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_multi_token_prediction_tensors_are_ignored(variant: str, tmp_path: Path) -> None:
    spec = write_checkpoint(tmp_path, variant).spec
    tensors = load_file(tmp_path / WEIGHTS)
    mtp = {"mtp.fc.weight": torch.ones(2, 2), "mtp.layers.0.mlp.gate.weight": torch.ones(1)}
    save_file(tensors | mtp, tmp_path / WEIGHTS, {"format": "pt"})
    load_model(tmp_path, load_spec(tmp_path), torch.float32, CPU)
    save_file(tensors | {"ntp.fc.weight": torch.ones(2)}, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(ModelError, match="hold unknown tensors .ntp.fc.weight"):
        load_model(tmp_path, spec, torch.float32, CPU)


def test_row_orders_group_queries_keys_values_and_gates() -> None:
    # for each of two key heads: a query, a key, two values
    assert rows_of_key_heads((2, 2, 4), 2).tolist() == [0, 4, 1, 5, 2, 3, 6, 7]
    # for each of two heads of two dimensions: a query, a gate
    assert gates_first(2, 2, torch.tensor([1, 0])).tolist() == [2, 3, 6, 7, 1, 0, 5, 4]


def test_gguf_columns_are_reordered_as_whole_blocks(tmp_path: Path) -> None:
    """The packed weights that the core multiplies equal those dequantised in float64."""
    sizes = {"hidden_size": 64, "linear_value_head_dim": 32, "linear_num_value_heads": 6}
    config = HYBRID | sizes
    write_own(tmp_path, "qwen3_5_text", config)
    path = convert(tmp_path, tmp_path / "model.gguf", kind=Q8_0)
    spec = load_spec(path)
    exact = load_model(path, spec, torch.float64, CPU)
    wanted = run_paged(exact, spec, TOKENS, [[37]], backend="reference", dtype=torch.float64)[0]
    checkpoint = load_model(tmp_path, load_spec(tmp_path), torch.float64, CPU)
    rounded = run_paged(checkpoint, spec, TOKENS, [[37]], backend="reference", dtype=torch.float64)
    assert (rounded[0] - wanted).norm() < 0.1 * wanted.norm()
    if core() is None:
        return
    packed, plain = (
        load_model(path, spec, torch.float32, CPU, LoadOptions(formats=formats))
        for formats in (AS_THEY_ARE, IN_THE_DTYPE)
    )
    assert isinstance(output_of(packed), PackedWeight)
    take_dequantised(plain, packed)
    torch.testing.assert_close(output_of(plain).double(), output_of(exact))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention.recurrent_layers": [True]}, "an array of 1 for 4 layers"),
        ({"ssm.inner_size": 25}, "ssm.inner_size is 25, not a multiple of 4 heads"),
        ({"ssm.state_size": 16}, r"ssm_conv1d.weight has the shape \[56, 4\]"),
        ({"nextn_predict_layers": 4}, "nextn_predict_layers is 4 of 4 layers"),
    ],
)
def test_contradictory_gguf_metadata_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, "qwen3_5")
    extra = {f"qwen35.{key}": value for key, value in change.items()}
    path = convert(tmp_path, tmp_path / "model.gguf", extra=extra)
    with pytest.raises(ModelError, match=message):
        load_spec(path)


def test_multi_token_prediction_layers_of_gguf_files_are_ignored(tmp_path: Path) -> None:
    """The metadata declares the last layer to be one."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    write_own(tmp_path, "qwen3_5_text", HYBRID | {"layer_types": kinds})
    extra = {"qwen35.nextn_predict_layers": 1}
    path = convert(tmp_path, tmp_path / "model.gguf", extra=extra)
    spec = load_spec(path)
    assert (spec.num_layers, spec.linear_layers) == (3, (0, 2))
    model = load_model(path, spec, torch.float32, CPU)
    assert run_paged(model, spec, TOKENS, [[37]])[0].isfinite().all()


@pytest.mark.parametrize("variant", ["qwen3_next", "qwen3_5"])
def test_linear_attention_is_refused_for_transformers_classes(variant: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant)
    with pytest.raises(ModelError, match="layers with states need one of quire's classes"):
        model_spec(tmp_path, "transformers")
