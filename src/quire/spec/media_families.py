"""Model types that read images by classes of quire: which text part each has, and its config.

The text part of such a model is a plain decoder. Its config stands in `text_config`, or, in old
checkpoints of Qwen2-VL and Qwen2.5-VL, next to `vision_config`. `EncoderSize` is the memory that a
vision tower takes besides its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from quire.spec.config_fields import Fields

WHOLE = "whole_config"  # a field of the made config: all but the text part of the whole config
TEXT_PART = "text_config"
ROPES = ("rope_scaling", "rope_parameters")
MROPE = "mrope"  # how old configs call a default rotation with three axes


@dataclass(frozen=True)
class Family:
    """The text part of a model type.

    text_types: the types that its config may name, and the type that runs it; the first is the
    default. defaults: transformers', for absent fields, where they are not those of that type.
    always: fields that it does not read from the config. is_flat: whether it may stand next to
    `vision_config`. has_mrope: whether positions have three axes. ties_by_part: whether the head is
    tied if the text part says so, also where the whole says otherwise.
    """

    text_types: Mapping[str, str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    is_flat: bool = False
    has_mrope: bool = False
    ties_by_part: bool = False


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
_SIZES = {  # of the text parts of LLaVA, whose configs on the hub leave them out
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

    Raises ModelError for a text part of another type.
    """
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
    """Return all but the text part of a config; None for a model without images."""
    whole = raw.get(WHOLE)
    return Fields(whole) if isinstance(whole, dict) else None


def _plain_rope(rope: Any) -> Any:
    """Return a rotary embedding whose type does not say that positions have three axes."""
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != MROPE:
        return rope
    return {name: value for name, value in rope.items() if name != "type"} | {
        "rope_type": "default"
    }


@dataclass(frozen=True)
class EncoderSize:
    """The size of a slot of the encoder cache, and what encoding holds at once for each token of an
    item, at most. most_tokens: of an item; None: as many as there is room for."""

    slot: int
    per_token: int
    most_tokens: int | None = None
