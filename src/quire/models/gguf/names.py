"""Map the tensor names of a GGUF file to the names in quire's layers. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from quire.spec.deepseek.multi_token import TYPES
from quire.spec.gguf.container import TensorEntry
from quire.spec.model_spec import ModelSpec

IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
EXPERT = "{}"  # stands for an expert's number where a tensor holds all experts of a layer


@dataclass(frozen=True)
class Names:
    """Names in quire's layers, by llama.cpp's names. whole: modules outside layers. layers: prefix
    of a layer's number. in_layer: modules of a layer; a key with a kind (`.weight`) is a tensor."""

    whole: Mapping[str, str]
    layers: str
    in_layer: Mapping[str, str]

    def but(self, **in_layer: str) -> "Names":
        """Return a copy with these names in layers added or replaced."""
        return Names(self.whole, self.layers, {**self.in_layer, **in_layer})


DECODER = Names(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    "model.layers",
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
GEMMA = DECODER.but(
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
QWEN_MOE = DECODER.but(
    ffn_gate_inp="mlp.gate",
    ffn_gate_exps="mlp.experts.{}.gate_proj",
    ffn_up_exps="mlp.experts.{}.up_proj",
    ffn_down_exps="mlp.experts.{}.down_proj",
)
SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
ROUTED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",  # both parts of it (latent_heads.py)
    "attn_v_b": "self_attn.kv_b_proj",
}
LINEAR = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # in older files
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
BY_TYPE = {
    "gpt2": Names(
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        "transformer.h",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
    ),
    "gpt_neox": Names(
        {
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        "gpt_neox.layers",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
    "mixtral": DECODER.but(
        ffn_gate_inp="block_sparse_moe.gate",
        ffn_gate_exps="block_sparse_moe.experts.{}.w1",
        ffn_up_exps="block_sparse_moe.experts.{}.w3",
        ffn_down_exps="block_sparse_moe.experts.{}.w2",
    ),
    "deepseek_v2": QWEN_MOE.but(**ROUTED, **LATENT),
    "deepseek_v3": QWEN_MOE.but(**ROUTED, **LATENT),
    "glm4_moe": QWEN_MOE.but(post_attention_norm="post_attention_layernorm", **ROUTED),
    "minicpm3": DECODER.but(**LATENT),
    "gpt_oss": QWEN_MOE.but(
        post_attention_norm="post_attention_layernorm",
        ffn_gate_inp="mlp.router",
        **{"attn_sinks.weight": "self_attn.sinks"},
    ),
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "glm4": DECODER.but(
        post_attention_norm="post_self_attn_layernorm",
        post_ffw_norm="post_mlp_layernorm",
        ffn_up="mlp.gate_up_proj",
    ),
    "olmo2": DECODER.but(
        post_attention_norm="post_attention_layernorm",
        post_ffw_norm="post_feedforward_layernorm",
    ),
    "phi3": DECODER.but(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj"),
    "qwen2_moe": QWEN_MOE.but(**SHARED),
    "qwen3_moe": QWEN_MOE,
    "qwen3_next": QWEN_MOE.but(**SHARED, **LINEAR),
    "qwen3_5_text": DECODER.but(**LINEAR),
    "qwen3_5_moe_text": QWEN_MOE.but(**SHARED, **LINEAR),
}


def is_prediction_layer(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor belongs to layers for multi-token prediction, which are not read."""
    found = IN_LAYER.fullmatch(name)
    has_such = spec.model_type in TYPES
    return has_such and found is not None and int(found.group(1)) >= spec.num_layers


def our_names(place: TensorEntry, spec: ModelSpec) -> list[str]:
    """Return the names of a tensor in quire's layers: one, or one per expert if the tensor holds
    all experts of a layer. A tensor without a name there keeps its own."""
    name = our_name(place.name, spec)
    if EXPERT not in name:
        return [name]
    return [name.replace(EXPERT, str(expert)) for expert in range(place.shape[0])]


def our_name(name: str, spec: ModelSpec) -> str:
    """Return a tensor's name in quire's layers, or its own. EXPERT stands for a number."""
    names = BY_TYPE.get(spec.model_type, DECODER)
    found = IN_LAYER.fullmatch(name)
    if found is None:
        stem, _, kind = name.rpartition(".")
        ours = names.whole.get(stem)
        return name if ours is None else f"{ours}.{kind}"
    layer, part = found.groups()
    stem, _, kind = part.rpartition(".")
    if part in names.in_layer:
        return f"{names.layers}.{layer}.{names.in_layer[part]}"
    if stem not in names.in_layer:
        return name
    return f"{names.layers}.{layer}.{names.in_layer[stem]}.{kind}"
