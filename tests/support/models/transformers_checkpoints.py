"""Tiny checkpoints of models that run by transformers' classes, and transformers' exact logits.

transformers' own attention computes its softmax in float32 for every dtype. So the reference here
attends in plain float64 arithmetic, over transformers' masks.
"""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from transformers.masking_utils import sdpa_mask

from quire.models.registry import model_spec
from quire.spec.model_spec import ModelSpec
from tests.support.models.checkpoints import EXPERTS, LLAMA, VOCAB, Checkpoint, Made

SMALL = LLAMA | {"pad_token_id": 0}
WINDOW = SMALL | {"head_dim": 8, "sliding_window": 6}
ROUTED = EXPERTS | {"pad_token_id": 0, "num_local_experts": 6}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
# Layers that use others' keys and values, and activations of which half are dropped.
SHARING = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5] * 4, "altup_num_inputs": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 4,
}  # fmt: skip
# Its layers may remember states instead, of which the config has an infinite limit.
ALL_ATTEND = {
    "layer_types": ["full_attention"] * 3, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "num_local_experts": 0, "shared_intermediate_size": 40,
}  # fmt: skip

# name -> (model_type, config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("gemma2", WINDOW),
    "gemma3": ("gemma3_text", WINDOW | {"sliding_window_pattern": 2}),
    "stablelm": ("stablelm", SMALL | {"use_qkv_bias": True, "qk_layernorm": True}),
    "starcoder2": ("starcoder2", SMALL | {"sliding_window": 7}),
    "phi": ("phi", SMALL),
    "phi3": ("phi3", SMALL | {"sliding_window": None}),
    "olmo2": ("olmo2", SMALL),
    "granite": ("granite", SMALL | {"logits_scaling": 3.0, "residual_multiplier": 0.7}),
    "glm4": ("glm4", WINDOW),
    "cohere2": ("cohere2", WINDOW | {"num_hidden_layers": 4, "logit_scale": 2.0}),
    "gpt_neox": ("gpt_neox", SMALL),
    "gpt_bigcode": ("gpt_bigcode", {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "mixtral": ("mixtral", ROUTED | {"sliding_window": 9}),
    "qwen2_moe": ("qwen2_moe", ROUTED | {"shared_expert_intermediate_size": 24}),
    "gpt_oss": ("gpt_oss", ROUTED | {"head_dim": 8, "sliding_window": 5}),
    "gemma3n": ("gemma3n_text", WINDOW | SHARING),
    "granitemoehybrid": ("granitemoehybrid", SMALL | ALL_ATTEND),
    "minicpm3": ("minicpm3", SMALL | LATENT | {"v_head_dim": 6, "num_key_value_heads": 4}),
}
# Variants and families that quire translates into its own operations.
TRANSLATED = (
    "llama_biases", "yarn_rope", "qwen3_tied", "mistral_window", "gemma2", "gemma3", "starcoder2",
    "phi", "phi3", "olmo2", "granite", "glm4", "cohere2", "gpt_neox",
)  # fmt: skip


def write_reference(directory: Path, model_type: str, config: dict[str, Any]) -> Checkpoint:
    """Write a checkpoint with weights large enough that every part matters. Tests share the model:
    do not change it."""
    made, spec = _make(model_type, json.dumps(config))
    made.write(directory)
    return Checkpoint(directory, spec, made.model)


@functools.lru_cache(maxsize=64)
def _make(model_type: str, config: str) -> tuple[Made, ModelSpec]:
    """Return a model in float64 with its files, and its spec for transformers' class."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **json.loads(config))
    )
    for name, parameter in made.named_parameters():
        is_norm = "norm" in name or ".ln_" in name
        parameter.data.normal_(1.0 if is_norm and name.endswith("weight") else 0.0, 0.25)
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        made.save_pretrained(directory)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float64,
            attn_implementation=use_exact_attention(),
            experts_implementation="eager",
        ).eval()
        spec = model_spec(directory, "transformers")
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return Made(model, files, torch.get_rng_state()), spec


def use_exact_attention() -> str:
    """Make attention in plain float64 known to transformers; returns its name there."""
    transformers.AttentionInterface.register("exact", _exact)
    transformers.AttentionMaskInterface.register("exact", sdpa_mask)
    return "exact"


def _exact(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    groups, num_tokens = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        attention_mask = torch.ones(num_tokens, num_tokens).tril().bool()
    scores = scores.masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.to(scores).reshape(1, -1, 1, 1).expand(1, -1, num_tokens, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :num_tokens]
    return (weights @ value).transpose(1, 2).contiguous(), None
