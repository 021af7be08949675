"""Model types with images that quire has classes for: their text parts and the configs of these.

The text part of such a model is a plain decoder. Its config is in `text_config`, or, in old
checkpoints of Qwen2-VL and Qwen2.5-VL, next to `vision_config`. `EncoderSize` is the memory of a
vision tower in addition to its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.spec.config_fields import Fields

WHOLE = "whole_config"  # field of a made config: the model's config without its text part
TEXT_PART = "text_config"
ROPES = ("rope_scaling", "rope_parameters")
MROPE = "mrope"  # old configs' name for a default rotary embedding with three axes


@dataclass(frozen=True)
class Family:
    """The text part of a model type."""

    text_types: Mapping[str, str]  # from type in the config to type to run; the first is default
    defaults: Mapping[str, Any] = field(default_factory=dict)  # for absent fields
    always: Mapping[str, Any] = field(default_factory=dict)  # fixed fields, whatever the config has
    is_flat: bool = False  # whether the config may be next to `vision_config`
    has_mrope: bool = False  # whether positions have three axes
    ties_by_part: bool = False  # whether a tied text part overrides an untied whole


_QWEN2 = {
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
}
_QWEN3 = {"rope_theta": 5e5, "max_position_embeddings": 128_000}
_NO_WINDOWS = {"use_sliding_window": False, "layer_types": None}
_MOE = {
    "num_key_value_heads": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}
_SIZES = {  # sizes of LLaVA's text parts, which configs on the hub omit
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
_LLAVA = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2"}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        name: Family(
            {f"{name}_text": "qwen2", name: "qwen2"},
            _QWEN2,
            is_flat=True,
            has_mrope=True,
            ties_by_part=True,
        )
        for name in ("qwen2_vl", "qwen2_5_vl")
    }
    | {
        "qwen3_vl": Family({"qwen3_vl_text": "qwen3"}, _QWEN3, _NO_WINDOWS, has_mrope=True),
        "qwen3_vl_moe": Family(
            {"qwen3_vl_moe_text": "qwen3_moe"},
            {**_QWEN3, **_MOE},
            {**_NO_WINDOWS, "norm_topk_prob": True},
            has_mrope=True,
        ),
        "gemma3": Family({"gemma3_text": "gemma3_text"}),
        "llava": Family(_LLAVA, _SIZES, ties_by_part=True),
        "llava_next": Family(_LLAVA, _SIZES),
    }
)


def knows_part(raw: Mapping[str, Any], family: Family) -> bool:
    """Return whether quire has a class for the text part of a config of this family."""
    own = (Fields(raw).inner(TEXT_PART) or Fields({})).text("model_type", "")
    return not own or own in family.text_types


def family_part(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config of the text part, with a `model_type` that quire has a class for.

    Raises ModelError for a text part of another type."""
    model_type, inner = raw["model_type"], Fields(raw).inner(TEXT_PART)
    if inner is None and family.is_flat:
        inner = Fields({name: value for name, value in raw.items() if name != "vision_config"})
    inner = inner or Fields({})
    own = inner.text("model_type", next(iter(family.text_types)))
    if own not in family.text_types:
        known = ", ".join(family.text_types)
        raise inner.error("model_type", f"the text part of a {model_type} is one of {known}")
    found = {**family.defaults, **{name: inner.value(name) for name in inner.names()}}
    if family.has_mrope:
        found |= {name: _plain_rope(found[name]) for name in ROPES if name in found}
    whole = {name: value for name, value in raw.items() if name != TEXT_PART}
    return found | dict(family.always) | {"model_type": family.text_types[own], WHOLE: whole}


def whole_fields(raw: Mapping[str, Any]) -> Fields | None:
    """Return a config without its text part; None for a model without images."""
    whole = raw.get(WHOLE)
    return Fields(whole) if isinstance(whole, dict) else None


def _plain_rope(rope: Any) -> Any:
    """Return a rotary embedding with its type changed from mrope to default."""
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != MROPE:
        return rope
    return {name: value for name, value in rope.items() if name != "type"} | {
        "rope_type": "default"
    }


@dataclass(frozen=True)
class EncoderSize:
    """The memory of the encoder. Sizes are counts of elements."""

    slot: int  # size of one slot of the encoder cache
    per_token: int  # maximum memory while encoding, for each token of an item
    max_tokens: int | None = None  # tokens of an item; None for no limit of its own
