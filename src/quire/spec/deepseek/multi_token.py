"""Find the layer for multi-token prediction (MTP) in a model's config.

The idea is in DeepSeek-V3 (arXiv 2412.19437), section 2.2. The layer is one more layer of the
model, with tensors of its own in the same checkpoint. Of several such layers the first is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.spec.config_fields import Fields

# Fields that number layers or list their kinds, for a config of the MTP layer alone. The layer has
# experts if the model has any, and attends to all tokens.
OF_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "mlp_layer_types": ["sparse"],
    "layer_types": ["full_attention"],
}
OWN_EMBEDDING = "mtp_use_dedicated_embeddings"


@dataclass(frozen=True)
class MultiTokenLayer:
    """The place of the layer in a model, and the names of its modules in a checkpoint."""

    num_before: int  # layers of the model
    prefix: str  # of all names
    layer: str  # decoder layer
    token_norm: str
    state_norm: str
    project: str  # projection of the token and the state
    norm: str  # norm after the layer
    copies: tuple[str, ...] = ()  # modules equal to the model's own embedding and head


def _nextn(num_layers: int) -> MultiTokenLayer:
    layer = f"model.layers.{num_layers}"
    return MultiTokenLayer(
        num_before=num_layers,
        prefix=f"{layer}.",
        layer=layer,
        token_norm=f"{layer}.enorm",
        state_norm=f"{layer}.hnorm",
        project=f"{layer}.eh_proj",
        norm=f"{layer}.shared_head.norm",
        copies=(f"{layer}.embed_tokens", f"{layer}.shared_head.head"),
    )


def _qwen(num_layers: int) -> MultiTokenLayer:
    return MultiTokenLayer(
        num_before=num_layers,
        prefix="mtp.",
        layer="mtp.layers.0",
        token_norm="mtp.pre_fc_norm_embedding",
        state_norm="mtp.pre_fc_norm_hidden",
        project="mtp.fc",
        norm="mtp.norm",
    )


# For each type with such layers: the field with their number, and the names.
NEXTN, QWEN_COUNT = "num_nextn_predict_layers", "mtp_num_hidden_layers"
TYPES: dict[str, tuple[str, Callable[[int], MultiTokenLayer]]] = {
    "deepseek_v3": (NEXTN, _nextn),
    "glm4_moe": (NEXTN, _nextn),
    "glm4_moe_lite": (NEXTN, _nextn),
    "qwen3_next": (NEXTN, _qwen),
    "qwen3_5_text": (QWEN_COUNT, _qwen),
    "qwen3_5_moe_text": (QWEN_COUNT, _qwen),
}


def multi_token_layer(fields: Fields, model_type: str, num_layers: int) -> MultiTokenLayer | str:
    """Return a model's first MTP layer, or the reason why it has none that quire runs. Without a
    number in the config, the weight files decide. Raises ModelError for invalid fields."""
    if model_type not in TYPES:
        return f"quire runs none of models of type {model_type}"
    count, layer_of = TYPES[model_type]
    if fields.integer(count, default=1, minimum=0) == 0:
        return f"{count} is 0 in its config"
    if fields.flag(OWN_EMBEDDING):
        raise fields.error(OWN_EMBEDDING, "MTP layers with an embedding of their own are not run")
    return layer_of(num_layers)
