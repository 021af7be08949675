"""The text part of a model that reads more than text, as a config of its own."""

from collections.abc import Mapping
from typing import Any

from quire.base.config_fields import Fields
from quire.base.media.families import FAMILIES, TEXT_PART, family_part, knows_part

# The types whose text part we run without the rest, and its type.
NESTED = {
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
TIES, TIED = "tie_word_embeddings", ("gemma3",)  # whose head is tied where no config says it
PART_OF = "text_part_of"  # a field of the made config: the type of the whole
# What the whole model's config says about the text part, too. The first wins over the second.
DTYPES = ("dtype", "torch_dtype")
SHARED = (*DTYPES, "bos_token_id", "eos_token_id", "quantization_config")


def text_part(raw: dict[str, Any], *, has_class: bool = False) -> dict[str, Any]:
    """Return a config's text part where that is inside of it, else the config itself.

    Models that read images may have text parts that quire has no class for; their configs stay as
    they are. has_class: raise ModelError for them. Raises ModelError for another type of text part
    than the model's.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in (*NESTED, *FAMILIES):
        return raw
    inner = Fields(raw).inner(TEXT_PART) or Fields({})
    if model_type in FAMILIES:
        family = FAMILIES[model_type]
        if not (has_class or knows_part(raw, family)):
            return raw
        found = family_part(raw, family)
        ties = Fields(raw).flag(TIES, model_type in TIED or inner.flag(TIES))
        ties = ties or (family.ties_by_part and inner.flag(TIES))
    else:
        found = _part(inner, model_type)
        ties = Fields(raw).flag(TIES, inner.flag(TIES))
    shared = _present(raw, SHARED)
    if _present(shared, DTYPES):
        found = {name: value for name, value in found.items() if name not in DTYPES}
    return found | shared | {TIES: ties, PART_OF: model_type}


def _part(inner: Fields, model_type: str) -> dict[str, Any]:
    own = NESTED[model_type]
    if inner.text("model_type", own) != own:
        raise inner.error("model_type", f"the text part of a {model_type} is a {own}")
    return {name: inner.value(name) for name in inner.names()} | {"model_type": own}


def _present(raw: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: raw[name] for name in names if raw.get(name) is not None}
