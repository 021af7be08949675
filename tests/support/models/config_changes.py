"""Every field of a model type's config, as transformers declares and reads it, and other values of
each that make sense."""

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

Change = dict[str, Any]  # values of a few fields
ABSENT = "absent"

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "quick_gelu", "silu", "swish")
ACTIVATIONS += ("relu", "relu2", "mish", "tanh", "linear")
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
FACTORS = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]  # as many as a head of 16 has frequencies
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN |= {"rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1]}
LONG |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
# The parameters of a rotary embedding, each changed in one that has a use for it.
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "default"},
    {"rope_theta": 500.0},
    {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    {"rope_type": "default", "rope_theta": 10000.0, "factor": 3.0},
    LINEAR,
    LINEAR | {"factor": 5.0},
    LINEAR | {"partial_rotary_factor": 0.5},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "unheard of", "rope_theta": 10000.0},
    LLAMA3,
    LLAMA3 | {"factor": 3.0},
    LLAMA3 | {"low_freq_factor": 2.0},
    LLAMA3 | {"high_freq_factor": 9.0},
    LLAMA3 | {"original_max_position_embeddings": 8},
    LLAMA3 | {"original_max_position_embeddings": None},
    YARN,
    YARN | {"factor": 9.0},
    YARN | {"original_max_position_embeddings": 8},
    YARN | {"attention_factor": 1.5},
    YARN | {"beta_fast": 20.0},
    YARN | {"beta_slow": 3.0},
    YARN | {"beta_fast": 20.0, "beta_slow": 3.0, "truncate": False},
    YARN | {"mscale": 2.0},
    YARN | {"mscale": 2.0, "mscale_all_dim": 0.5},
    YARN | {"partial_rotary_factor": 0.5},
    LONG,
    LONG | {"original_max_position_embeddings": 8},
    LONG | {"factor": 3.0},
    LONG | {"attention_factor": 1.5},
    LONG | {"short_factor": FACTORS[:4]},
    LONG | {"long_factor": FACTORS[:4]},
    LONG | {"short_mscale": 1.5, "long_mscale": 2.0},
    LONG | {"partial_rotary_factor": 0.5, "short_factor": FACTORS[:4], "long_factor": FACTORS[4:]},
]
# What classes read that do not declare it, and what people write whoever reads it.
OTHERS: dict[str, list[Any]] = {
    "rope_theta": [500.0],
    "partial_rotary_factor": [0.5, 1.0],
    "rotary_pct": [0.5, 1.0],
    "rotary_emb_base": [500.0],
    "original_max_position_embeddings": [8],
    "torch_dtype": ["float16"],
    "sliding_window": [6, None],
    "use_sliding_window": [True, False],
    "sliding_window_pattern": [2, 3],
    "max_window_layers": [0, 1],
    "attn_logit_softcapping": [3.0],
    "final_logit_softcapping": [3.0],
    "attention_bias": [True, False],
    "mlp_bias": [True, False],
    "head_dim": [16, 8, 12],
    "num_key_value_heads": [1, 4],
    "hidden_act": ["gelu", "silu", "relu"],
    "qk_layernorm": [True],
    "use_qk_norm": [True],
    "clip_qkv": [3.0],
    "query_pre_attn_scalar": [7],
    "embedding_multiplier": [3.0],
    "residual_multiplier": [0.5],
    "logits_scaling": [3.0],
    "attention_multiplier": [0.5],
    "quantization_config": [{"quant_method": "unheard of"}],
    "full_attention_interval": [2, 3],
    "attn_output_gate": [False],
    "per_layer_config": [{"0": {"hidden_act": "relu"}}],
}
# Of the class's own workings: how it is called, trained and saved. The first three change the form
# of what it returns.
NOT_OF_THE_MODEL = {"output_hidden_states", "output_attentions", "return_dict"}
NOT_OF_THE_MODEL |= {"model_type", "architectures", "transformers_version", "num_hidden_layers"}
NOT_OF_THE_MODEL |= {"get_text_config", "to_dict", "id2label", "label2id", "problem_type"}


def declared_fields(model_type: str) -> dict[str, str]:
    """Name and annotation of each field of the config class."""
    config_class = type(transformers.AutoConfig.for_model(model_type))
    return {field.name: str(field.type) for field in dataclasses.fields(config_class)}


def fields_read(model_type: str) -> set[str]:
    """What the files of the model read of a config."""
    config_class = type(transformers.AutoConfig.for_model(model_type))
    folder = Path(inspect.getfile(config_class)).parent
    text = "".join(path.read_text("utf-8") for path in sorted(folder.glob("model*_*.py")))
    found = re.findall(
        r"""\bconfig\.([a-z]\w*)\b(?!\()|getattr\((?:self\.)?config, "(\w+)\"""", text
    )
    return {name or other for name, other in found}


def changes(model_type: str, base: Mapping[str, Any]) -> Iterator[Change]:
    """Each field with each of its other values, alone. base: the config that they change."""
    declared = declared_fields(model_type)
    names = dict.fromkeys([*base, *declared, *sorted(fields_read(model_type)), *OTHERS])
    for name in names:
        if name in NOT_OF_THE_MODEL or name.startswith(("_", "rope_scaling", "rope_parameters")):
            continue
        now = base.get(name)
        seen = [now]
        for value in (*_others(name, now, declared.get(name, ""), base), *OTHERS.get(name, ())):
            if value not in seen:
                seen.append(value)
                yield {name: value}
        if name in base:
            yield {name: ABSENT}
            if now is not None:
                yield {name: None}


def _others(name: str, now: Any, kind: str, base: Mapping[str, Any]) -> list[Any]:
    """Other values of a field's type."""
    if name == "layer_types" or name.endswith("layer_types"):
        return _layer_types(base)
    if name.endswith("_act") or "activation" in name:
        return list(ACTIVATIONS)
    if isinstance(now, bool) or (now is None and "bool" in kind):
        return [True, False]
    if isinstance(now, int):
        return [now * 2, now // 2] if now else [1]
    if isinstance(now, float):
        return [now * 2, now / 2, 0.0] if now else [0.25]
    if isinstance(now, str):
        return ["bfloat16", "float64"] if name == "dtype" else ["unheard of"]
    if isinstance(now, list):
        return [now[::-1], now[:1], []]
    if now is None and "int" in kind:
        return [3]
    if now is None and "float" in kind:
        return [0.5]
    return []


def _layer_types(base: Mapping[str, Any]) -> list[Any]:
    count = base.get("num_hidden_layers", base.get("n_layer"))
    assert isinstance(count, int)
    of_hybrids = [
        [LINEAR] * count,
        [(FULL, LINEAR)[i % 2] for i in range(count)],
        [(LINEAR, FULL)[i % 2] for i in range(count)],
    ]
    return (of_hybrids if LINEAR in (base.get("layer_types") or ()) else []) + [
        [FULL] * count,
        [SLIDING] * count,
        [(FULL, SLIDING)[i % 2] for i in range(count)],
        [(SLIDING, FULL)[i % 2] for i in range(count)],
        ["chunked_attention"] * count,
        [FULL],
    ]


def ropes(base: Mapping[str, Any]) -> Iterator[Change]:
    """Rotary embeddings under each name that a config may give them, of all layers or by layer."""
    own = base.get("rope_parameters")
    kinds = [name for name, value in (own or {}).items() if isinstance(value, dict)]
    if own is not None:
        yield {"rope_parameters": ABSENT}
        yield {"rope_parameters": None}
    for rope in ROPES:
        yield {"rope_parameters": dict(rope)}
        for kind in kinds:
            assert own is not None
            yield {"rope_parameters": {**own, kind: dict(rope)}}
    for rope in (LINEAR, YARN, LLAMA3, LONG, ROPES[0]):
        yield {"rope_scaling": dict(rope)}
        yield {"rope_scaling": dict(rope), "rope_parameters": ABSENT, "rope_theta": 700.0}
        yield {"rope_parameters": dict(rope), "original_max_position_embeddings": 16}
    yield {"rope_parameters": {kind: dict(ROPES[i]) for i, kind in enumerate((FULL, SLIDING))}}
