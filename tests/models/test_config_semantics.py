"""Unusual values of config fields give transformers' logits, or are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quire.base.errors import ModelError
from quire.models.checkpoint.source import resolve_model, shape_names
from quire.models.families.phi3 import phi3_rope
from quire.models.load.loading import load_model
from quire.models.parts import layers
from quire.models.parts.rope import rope_frequencies
from quire.models.qwen.qwen3_next import hybrid_options
from quire.models.registry import make_model
from quire.spec.model_options import ACTIVATIONS
from quire.spec.model_spec import load_spec, parse_spec
from tests.support.models.checkpoints import LONGROPE, VARIANTS, random_tokens, write_checkpoint
from tests.support.models.paged_forward import CPU, run_paged

TOKENS = random_tokens(40)
WINDOW = {"sliding_window": 6, "max_window_layers": 1}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
FACTORS = {name: value for name, value in LONGROPE.items() if name != "rope_type"}
ABSENT = "absent"

# variant, changes of its config, whether they change the logits
SAME: list[tuple[str, dict[str, Any], bool]] = [
    ("qwen2", WINDOW, False),
    ("qwen3", WINDOW, False),
    ("qwen3_moe", WINDOW, False),
    ("qwen3", WINDOW | {"use_sliding_window": False}, False),
    ("qwen2", WINDOW | {"use_sliding_window": True, "layer_types": ABSENT}, True),
    ("qwen2_windows", {"layer_types": ["attention", "sliding_attention", "attention"]}, True),
    ("qwen3_moe", WINDOW | {"use_sliding_window": True}, True),
    ("mistral_window", {"sliding_window": None}, True),
    ("mistral_window", {"layer_types": ["sliding_attention"] * 3}, False),
    ("llama", {"sliding_window": 6, "use_sliding_window": False}, False),
    ("llama", {"layer_types": ["full_attention"] * 3, "sliding_window": None}, False),
    # rotary embeddings
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "rope_theta": 50.0}, True),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 3.0}}, True),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}, True),
    ("llama", {"rope_parameters": ABSENT, "rope_theta": 50.0}, True),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}, True),
    ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}}, True),
    ("llama", {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64}, True),
    (
        "llama3_rope",
        {"original_max_position_embeddings": 8},
        True,
    ),
    ("llama", {"rope_scaling": LLAMA3}, True),
    ("qwen3", {"rope_scaling": YARN}, True),
    ("yarn_rope", {"original_max_position_embeddings": 8}, True),
    ("qwen3", {"rope_scaling": YARN | {"original_max_position_embeddings": 16}}, True),
    ("yarn_rope", {"rope_scaling": YARN | {"factor": None}, "rope_parameters": ABSENT}, True),
    ("qwen3", {"rope_scaling": YARN | {"truncate": False, "beta_fast": 20, "beta_slow": 3}}, True),
    ("qwen3", {"rope_scaling": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}}, True),
    ("qwen3", {"rope_scaling": YARN | {"mscale": 2.0}}, True),
    ("qwen3", {"rope_scaling": YARN | {"attention_factor": 1.5}}, True),
    ("llama", {"rope_scaling": {}, "partial_rotary_factor": None}, False),
    # layers
    ("llama", {"rms_norm_eps": 0.3}, True),
    ("llama", {"hidden_act": "gelu"}, True),
    ("qwen3", {"hidden_act": "gelu_pytorch_tanh"}, True),
    ("gpt2", {"layer_norm_epsilon": 0.3}, True),
    ("gpt2", {"scale_attn_weights": False}, True),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, True),
    ("gpt2", {"activation_function": "relu"}, True),
    ("gpt2", {"n_ctx": 7, "head_dim": 16, "num_key_value_heads": 1}, False),
    ("gpt2", {"reorder_and_upcast_attn": True}, False),
    ("opt", {"activation_function": "gelu"}, True),
    ("opt", {"intermediate_size": 7, "head_dim": 16, "num_key_value_heads": 1}, False),
    ("opt_350m", {"_remove_final_layer_norm": True}, False),
    ("qwen2", {"attention_bias": False}, False),
    ("mistral", {"attention_bias": True, "mlp_bias": True}, False),
    ("qwen3_moe", {"norm_topk_prob": False}, True),
    ("qwen3_moe", {"num_experts_per_tok": 5}, True),
    ("llama", {"attn_logit_softcapping": 3.0, "pretraining_tp": 2}, False),
    # phi3
    ("phi3", {"sliding_window": None}, True),
    ("phi3", {"hidden_act": "gelu_new"}, True),
    ("phi3", {"attention_bias": True, "mlp_bias": True, "embd_pdrop": 0.5}, False),
    ("phi3", {"rope_parameters": ABSENT, "partial_rotary_factor": 0.5, "rope_theta": 50.0}, True),
    ("phi3", {"original_max_position_embeddings": 4}, False),
    ("phi3_short", {"rope_scaling": LONGROPE | {"factor": None, "rope_theta": 9.0}}, True),
    (
        "phi3_short",
        {"rope_scaling": FACTORS | {"type": "su", "original_max_position_embeddings": 64}},
        True,
    ),
    ("phi3_short", {"rope_scaling": LONGROPE | {"attention_factor": 1.5}}, True),
    ("phi3_long", {"rope_scaling": LONGROPE}, True),
    ("phi3_long", {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 128}}, True),
    ("phi3_long", {"max_position_embeddings": 64, "rope_parameters": LONGROPE}, True),
    # Gemma
    ("gemma2", {"query_pre_attn_scalar": 7}, True),
    ("gemma2", {"attn_logit_softcapping": None}, True),
    ("gemma2", {"attn_logit_softcapping": 0.5}, True),
    ("gemma2", {"attn_logit_softcapping": ABSENT, "final_logit_softcapping": ABSENT}, True),
    ("gemma2", {"final_logit_softcapping": None}, True),
    ("gemma2", {"hidden_activation": "silu"}, True),
    ("gemma2", {"hidden_activation": ABSENT, "hidden_act": "relu"}, False),
    ("gemma2", {"layer_types": ABSENT, "sliding_window_pattern": 3}, False),
    ("gemma2", {"layer_types": ["full_attention"] * 4}, True),
    ("gemma2", {"sliding_window": 3}, True),
    ("gemma2", {"rms_norm_eps": 0.3}, True),
    ("gemma2", {"rope_parameters": ABSENT, "rope_theta": 50.0}, True),
    ("gemma3", {"query_pre_attn_scalar": 7}, True),
    ("gemma3", {"final_logit_softcapping": 1.0}, True),
    ("gemma3", {"attn_logit_softcapping": 0.5}, False),
    ("gemma3", {"hidden_activation": "gelu"}, True),
    ("gemma3", {"layer_types": ABSENT, "sliding_window_pattern": 2}, True),
    ("gemma3", {"layer_types": ABSENT}, True),
    ("gemma3", {"rope_parameters": ABSENT, "rope_theta": 50.0}, True),
    ("gemma3", {"rope_parameters": ABSENT, "rope_local_base_freq": 7.0}, True),
    ("gemma3", {"rope_parameters": ABSENT}, False),
    (
        "gemma3",
        {"rope_parameters": ABSENT, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        True,
    ),
    ("gemma3_scaled", {"rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}}, True),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": YARN | {"original_max_position_embeddings": 16}}},
        True,
    ),
    # other families
    ("olmo2", {"rms_norm_eps": 0.3}, True),
    ("olmo2", {"hidden_act": "gelu"}, True),
    ("olmo2", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}, True),
    ("granite", {"embedding_multiplier": 1.0}, True),
    ("granite", {"attention_multiplier": ABSENT}, True),
    ("granite", {"residual_multiplier": 1.5}, True),
    ("granite", {"logits_scaling": ABSENT}, True),
    ("granite", {"rms_norm_eps": 0.3}, True),
    ("granite", {"hidden_act": "gelu", "logit_scale": 3.0}, True),
    ("smollm3", {"no_rope_layers": [0, 1, 1, 0]}, True),
    ("smollm3", {"no_rope_layers": None}, False),
    ("smollm3", {"no_rope_layers": ABSENT, "no_rope_layer_interval": 2}, True),
    ("smollm3", {"sliding_window": 5}, False),
    ("smollm3", {"layer_types": ABSENT, "sliding_window": 5, "use_sliding_window": True}, True),
    ("smollm3_windows", {"layer_types": ["sliding_attention"] * 4}, True),
    ("smollm3", {"rope_parameters": ABSENT, "rope_theta": 50.0}, True),
    ("smollm3", {"rope_parameters": ABSENT}, False),
    ("cohere2", {"logit_scale": 2.0}, True),
    ("cohere2", {"logit_scale": ABSENT}, True),
    ("cohere2", {"layer_norm_eps": 0.3}, True),
    ("cohere2", {"rms_norm_eps": 0.3, "use_qk_norm": True}, False),
    ("cohere2", {"layer_types": ABSENT, "sliding_window_pattern": 3}, True),
    ("cohere2", {"layer_types": ABSENT}, False),
    ("cohere2", {"sliding_window": 4}, True),
    ("cohere2", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}, True),
    ("cohere2", {"hidden_act": "gelu_new"}, True),
    # mixtures of experts
    ("mixtral", {"num_experts_per_tok": 5}, True),
    ("mixtral", {"num_local_experts": ABSENT, "num_experts": 5}, False),
    ("mixtral", {"sliding_window": 5}, True),
    ("mixtral", {"norm_topk_prob": False, "attention_bias": True}, False),
    ("mixtral", {"rope_parameters": ABSENT}, False),
    ("mixtral", {"rope_parameters": ABSENT, "rope_theta": 50.0}, True),
    ("mixtral", {"rms_norm_eps": 0.3, "router_jitter_noise": 0.5}, True),
    ("qwen2_moe", {"norm_topk_prob": False}, True),
    ("qwen2_moe", {"num_experts_per_tok": 4}, True),
    ("qwen2_moe", {"num_local_experts": 2, "attention_bias": False}, False),
    ("qwen2_moe_some", {"layer_types": ["full_attention"] * 4}, True),
    ("qwen2_moe_some", {"layer_types": ABSENT, "max_window_layers": 0}, True),
    ("gpt_oss", {"swiglu_alpha": 1.0}, True),
    ("gpt_oss", {"swiglu_limit": ABSENT}, True),
    ("gpt_oss", {"swiglu_alpha": ABSENT}, False),
    ("gpt_oss", {"num_experts_per_tok": 3}, True),
    ("gpt_oss", {"layer_types": ABSENT, "sliding_window_pattern": 3}, False),
    ("gpt_oss", {"sliding_window": 4}, True),
    ("gpt_oss", {"hidden_act": "relu", "norm_topk_prob": False}, False),
    ("gpt_oss", {"rope_parameters": None}, True),
    ("gpt_oss", {"rope_parameters": ABSENT}, True),
    ("gpt_oss", {"rope_scaling": YARN | {"truncate": False, "rope_theta": 500.0}}, True),
    # gpt_neox
    ("gpt_neox", {"use_parallel_residual": False}, True),
    ("gpt_neox", {"rope_parameters": ABSENT, "rotary_pct": 1.0, "rotary_emb_base": 50}, True),
    ("gpt_neox", {"rope_parameters": ABSENT, "rope_theta": 9.0, "num_key_value_heads": 1}, False),
    ("gpt_neox", {"rope_scaling": {"type": "linear", "factor": 3.0}}, True),
    ("gpt_neox", {"hidden_act": "gelu_python"}, False),
    ("gpt_neox", {"hidden_act": "gelu_new", "layer_norm_eps": 0.3}, True),
    ("gpt_neox", {"sliding_window": None, "rms_norm_eps": 0.3}, False),
    # glm4
    ("glm4", {"rope_parameters": ABSENT, "partial_rotary_factor": 1.0}, True),
    ("glm4", {"rope_parameters": ABSENT}, False),
    ("glm4", {"rope_scaling": YARN | {"partial_rotary_factor": 0.25}}, True),
    ("glm4", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 0.3}, True),
    ("glm4", {"mlp_bias": True}, False),
]


def changed(folder: Path, variant: str, changes: dict[str, Any]) -> Path:
    write_checkpoint(folder, variant)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ABSENT}))
    return folder


def reference_model(folder: Path, plain: torch.nn.Module) -> torch.nn.Module:
    """Return transformers' model for a folder's config, with the weights of another model."""
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    left = model.load_state_dict(plain.state_dict(), strict=False)
    assert not left.missing_keys
    return model


@torch.inference_mode()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor(TOKENS)).logits[0]
    return logits


@pytest.mark.parametrize("variant", dict.fromkeys(variant for variant, _, _ in SAME))
def test_changed_configs_match_transformers(variant: str, tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "plain", variant).model
    unchanged = logits_of(plain)
    for number, (name, changes, differs) in enumerate(SAME):
        if name == variant:
            folder = changed(tmp_path / str(number), variant, changes)
            wanted, spec = logits_of(reference_model(folder, plain)), load_spec(folder)
            assert torch.allclose(unchanged, wanted, rtol=1e-3, atol=1e-3) != differs, changes
            got = run_paged(load_model(folder, spec, torch.float32, CPU), spec, TOKENS, [[40]])[0]
            torch.testing.assert_close(
                got, wanted, rtol=2e-4, atol=2e-4, msg=lambda text, of=changes: f"{of}: {text}"
            )


TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"sliding_window": 6}, "sliding_window is 6; llama has no windows"),
    ("llama", {"layer_types": TYPES}, r"layer_types is \['slid.*; layer 0 is sliding_attention"),
    ("mistral_window", {"layer_types": TYPES}, "layer 1 is full_attention, but mistral has a win"),
    ("mistral_window", {"use_sliding_window": False}, "use_sliding_window is false; mistral does"),
    ("mistral_window", {"sliding_window": 0}, "sliding_window is 0; it must be .* from 1"),
    ("qwen2", WINDOW | {"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
    ("qwen2", {"layer_types": TYPES}, "sliding_attention needs a sliding_window, and use_sl"),
    ("qwen2_windows", {"layer_types": TYPES[:2]}, "layer_types is .*; it names 2 of 3 layers"),
    ("qwen3", {"layer_types": ["chunked_attention"] * 3}, "'chunked_attention' is not supported"),
    (
        "qwen3_moe_window",
        {"layer_types": ["full_attention"] * 3},
        "layer 0 is full_attention, but qwen3_moe has a window of 6",
    ),
    ("qwen3", {"layer_types": "full_attention"}, "layer_types is 'full_attention'; .* a list"),
    (
        "qwen3",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
        "rope_parameters: full_attention is {.*rotary embeddings that differ by layer",
    ),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type is 'dynamic'; .* not su"),
    ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling has no factor"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; .* part of each"),
    ("llama", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ("gpt2", {"activation_function": "tanh"}, "'tanh' is not supported; supported are gelu"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true"),
    ("llama", {"per_layer_config": {"0": {"hidden_act": "relu"}}}, "per_layer_config is {"),
    (
        "llama",
        {"quantization_config": {"quant_method": "aqlm"}},
        "quant_method is 'aqlm'; this quant",
    ),
    ("llama", {"quantization_config": {}, "quantization_config_": 1, "dtype": "int8"}, "dtype is"),
    ("qwen3_moe", {"num_experts": 6, "num_local_experts": 7}, "num_experts is 6; but num_local"),
    ("phi3", {"per_layer_config": {"0": {"hidden_act": "relu"}}}, "per_layer_config is {"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "type is 'linear'; phi3 has def"),
    ("phi3_long", {"rope_scaling": LONGROPE | {"long_factor": [1.0]}}, "long_factor is .* 6 numbe"),
    ("phi3_long", {"rope_scaling": LONGROPE | {"long_factor": None}}, "long_factor is .* 6 numbe"),
    ("phi3_short", {"rope_scaling": LONGROPE | {"short_factor": "x"}}, "short_factor is 'x'"),
    ("gpt_neox", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supp.* gelu"),
    ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok is 6; it sends .* to 6 of 5 exp"),
    ("mixtral", {"hidden_act": "gelu"}, "mixtral with hidden_act 'gelu' is not supported"),
    ("mixtral", {"num_local_experts": 5, "num_experts": 4}, "num_experts is 4; but num_local_exp"),
    ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; .* below 1"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0"),
    ("gpt_oss", {"sliding_window": None}, "has no sliding_window"),
    ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit is 0.0; it must be a number above 0"),
    (
        "gpt_oss",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5",
    ),
    ("gpt_neox", {"head_dim": 8}, "head_dim is 8; heads of gpt_neox have 16"),
    ("gpt_neox", {"sliding_window": 8}, "sliding_window is 8; gpt_neox has no windows"),
    ("phi3_long", {"original_max_position_embeddings": 1}, "original_max.* is 1; longrope needs"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true; only"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true; only"),
    ("gemma2", {"sliding_window": None}, "has no sliding_window"),
    ("gemma2", {"hidden_activation": "relu"}, "activation 'relu' is not supported"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number abo"),
    ("gemma2", {"per_layer_config": {"0": {"head_dim": 2}}}, "per_layer_config is {"),
    ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "rope_theta is 5.0; it must stand under"),
    ("gemma3", {"rope_scaling": {"type": "linear", "factor": 3.0}}, "type is 'linear'; transf"),
    (
        "gemma3",
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
        "rotary embedding of full_attention: rope_type is 'dynamic'; .* not supported",
    ),
    ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; all of each head"),
    ("granite", {"logits_scaling": 0}, "logits_scaling is 0; it must be a number above 0"),
    ("granite", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    ("olmo2", {"sliding_window": 6}, "sliding_window is 6; olmo2 has no windows"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; it has 2 of 4 layers"),
    ("smollm3", {"no_rope_layers": [2, 1, 0, 1]}, "no_rope_layers is .*from 0 to 1"),
    ("glm4", {"head_dim": 5}, "that rotates 2 of the 5 dimensions of a head .head_dim."),
    ("cohere2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; .* part of each"),
]


@pytest.mark.parametrize("variant", dict.fromkeys(variant for variant, _, _ in REFUSED))
def test_unsupported_configs_are_refused_by_field_and_value(variant: str, tmp_path: Path) -> None:
    for name, changes, message in REFUSED:
        if name == variant:
            folder = changed(tmp_path, variant, changes)
            try:
                make_model(load_spec(folder), torch.float32, torch.device("meta"))
            except ModelError as error:
                assert re.search(message, str(error)), changes
            else:
                pytest.fail(f"{changes} is not refused")


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"bits": 8}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ],
)
def test_configs_that_quantise_only_keys_and_values_are_accepted(
    quantised: dict[str, Any], tmp_path: Path
) -> None:
    load_spec(changed(tmp_path, "llama", {"quantization_config": quantised}))


def test_missing_fields_have_transformers_defaults() -> None:
    config = {"num_attention_heads": 32, "hidden_size": 512, "head_dim": ABSENT}
    config |= {"num_key_value_heads": ABSENT, "sliding_window": ABSENT}
    found = {}
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe"):
        raw = {"model_type": model_type} | VARIANTS["llama"][1] | config
        spec = parse_spec({name: value for name, value in raw.items() if value is not ABSENT})
        found[model_type] = (spec.num_kv_heads, spec.head_dim, spec.layer_windows[0])
    assert found == {
        "llama": (32, 16, None),
        "mistral": (8, 16, 4096),
        "qwen2": (32, 16, None),
        "qwen3": (32, 128, None),
        "qwen3_moe": (4, 16, None),
    }


def test_every_built_in_shape_has_valid_rotary_frequencies() -> None:
    for name in shape_names():
        spec = load_spec(resolve_model(f"shape:{name}").directory)
        if spec.model_type not in ("gpt2", "opt"):
            rope = phi3_rope(spec) if spec.model_type == "phi3" else None
            if spec.linear_layers:
                rope = next(each for each in hybrid_options(spec).ropes if each is not None)
            rope = rope or spec.rope
            frequencies = rope_frequencies(rope, spec.head_dim)[: rope.rotated // 2]
            assert torch.isfinite(frequencies).all()
            assert (frequencies > 0).all()


def test_configs_allow_the_activations_that_layers_have() -> None:
    assert set(ACTIVATIONS) == layers.ACTIVATIONS.keys()
