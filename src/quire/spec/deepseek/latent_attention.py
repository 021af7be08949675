"""Read the sizes of multi-head latent attention (MLA) from a config (DeepSeek-V2, arXiv 2405.04434,
section 2.1).

A layer caches one vector per token for all heads. Every head makes its own key and value of the
vector's compressed part. All heads share its other part, a rotated key.

    latent vector   [ compressed: rank | rotated key: rotated_dim ]
    a head's key    [ made of compressed: plain_dim | rotated key ]
    a head's value  [ made of compressed: value_dim ]
"""

import math
from dataclasses import dataclass

from quire.spec.config_fields import Fields
from quire.spec.rope_options import own_fields, rope_kind

# Types with latent attention, and whether they rotate neighbouring dimensions by default.
LATENT_TYPES = {
    "deepseek_v2": True,
    "deepseek_v3": True,
    "glm4_moe_lite": True,
    "minicpm3": False,
}
WITH_CHOICE = ("deepseek_v3", "glm4_moe_lite")  # types whose config chooses that
MAX_DIM = 1 << 13
HEADS, KV_HEADS = "num_attention_heads", "num_key_value_heads"


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of latent attention, in elements."""

    query_rank: int | None  # size of compressed queries; None if queries are not compressed
    rank: int  # size of a token's compressed vector
    plain_dim: int  # part of a head's query and key without a rotation
    rotated_dim: int  # part of a head's query and key with a rotation
    value_dim: int  # size of a head's value
    is_interleaved: bool  # whether the rotation pairs neighbouring dimensions
    scale: float  # factor of scores

    @property
    def latent_dim(self) -> int:
        """Size of the vector that is cached per token."""
        return self.rank + self.rotated_dim

    @property
    def query_dim(self) -> int:
        """Size of a head's query."""
        return self.plain_dim + self.rotated_dim

    def parameters(self, hidden_size: int, num_heads: int) -> int:
        """Return the number of weights in a layer."""
        queries, width = num_heads * self.query_dim, self.query_rank or hidden_size
        found = width * queries + hidden_size * self.latent_dim
        found += 0 if self.query_rank is None else hidden_size * self.query_rank
        per_head = (self.plain_dim + self.value_dim) * self.rank
        return found + num_heads * (per_head + self.value_dim * hidden_size)


def latent_attention(
    fields: Fields, model_type: str, hidden_size: int, num_heads: int
) -> LatentAttention:
    """Read the sizes from a config. num_heads: of the whole model. Raises ModelError."""
    found = fields.integer(KV_HEADS, default=num_heads)
    if found != num_heads:
        raise fields.error(KV_HEADS, f"latent attention needs as many as {HEADS}, {num_heads}")
    query_rank = None
    if fields.has("q_lora_rank"):
        query_rank = fields.integer("q_lora_rank")
    plain, rotated = (
        fields.integer(name, maximum=MAX_DIM) for name in ("qk_nope_head_dim", "qk_rope_head_dim")
    )
    if rotated % 2:
        raise fields.error("qk_rope_head_dim", "pairs of dimensions are rotated: it must be even")
    if model_type == "glm4_moe_lite" and fields.integer("head_dim", default=rotated) != rotated:
        raise fields.error("head_dim", f"it is another name of qk_rope_head_dim, {rotated}")
    own_value = None if fields.has("v_head_dim") else max(1, hidden_size // num_heads)
    is_interleaved = LATENT_TYPES[model_type]
    if model_type in WITH_CHOICE and not fields.is_null("rope_interleave"):
        is_interleaved = fields.flag("rope_interleave", is_interleaved)
    elif model_type in WITH_CHOICE:
        is_interleaved = False
    return LatentAttention(
        query_rank,
        rank=fields.integer("kv_lora_rank", maximum=MAX_DIM),
        plain_dim=plain,
        rotated_dim=rotated,
        value_dim=fields.integer("v_head_dim", default=own_value, maximum=MAX_DIM),
        is_interleaved=is_interleaved,
        scale=(plain + rotated) ** -0.5 * _sharpness(own_fields(fields)),
    )


def _sharpness(rope: Fields) -> float:
    """Return the factor by which yarn sharpens all scores, for contexts beyond the training's."""
    weight = rope.number("mscale_all_dim", 0.0, above=False)
    if rope_kind(rope) == "default" or not weight:
        return 1.0
    factor = rope.number("factor")
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
