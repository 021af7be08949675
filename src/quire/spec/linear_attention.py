"""Layers with linear attention: which layers of a model have it, and their sizes.

Such a layer keeps a state of its sequence, not its tokens: the last inputs of a short convolution,
and a memory that the gated delta rule reads and corrects (`ops/attention/base.py`).
"""

from dataclasses import dataclass, replace

from quire.spec.config_fields import Fields
from quire.spec.cuts import cut_evenly, cut_or_repeat

HYBRID_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LINEAR = "linear_attention"
MAX_HEADS, MAX_HEAD_DIM, MAX_WIDTH = 1 << 14, 1 << 14, 1 << 8
FLOAT32S = 2  # of a number that is computed in float32 beside one in the model's dtype


@dataclass(frozen=True)
class LinearAttention:
    """key_heads: heads of queries and of keys, of `key_dim` numbers each; value_heads of
    `value_dim` are a multiple of them. width: inputs of the convolution that an output sees."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def keys_size(self) -> int:
        """Numbers of the queries, or of the keys, of a token."""
        return self.key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Numbers that are convolved: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    @property
    def num_inputs(self) -> int:
        """Numbers of a token that its convolution and delta rule are given."""
        return self.channels + 2 * self.value_heads

    @property
    def state_size(self) -> int:
        """Elements of a layer's state: the convolution's last inputs, and the memory."""
        return self.channels * (self.width - 1) + self.values_size * self.key_dim

    @property
    def activations(self) -> int:
        """Bound the elements that a layer makes of a token."""
        gates = 2 * self.value_heads
        return (2 + FLOAT32S) * self.channels + 4 * self.values_size + 4 * gates

    def of_ranks(self, num_ranks: int) -> "LinearAttention":
        """Return the sizes of each of so many ranks. Raises ConfigError where they cannot be."""
        keys = cut_or_repeat(self.key_heads, 0, num_ranks, "linear_num_key_heads")
        values = cut_evenly(self.value_heads, 0, num_ranks, "linear_num_value_heads")
        return replace(self, key_heads=keys.count, value_heads=values.count)

    def parameters(self, hidden_size: int) -> int:
        """Count the weights that a token of so many elements is multiplied with."""
        return hidden_size * (self.channels + 2 * self.values_size + 2 * self.value_heads)


def linear_attention(fields: Fields) -> LinearAttention:
    """Read the sizes. Raises ModelError."""
    key_heads = fields.integer("linear_num_key_heads", default=16, most=MAX_HEADS)
    value_heads = fields.integer("linear_num_value_heads", default=32, most=MAX_HEADS)
    if value_heads % key_heads:
        raise fields.error(
            "linear_num_value_heads" if fields.has("linear_num_value_heads") else
            "linear_num_key_heads",
            f"{value_heads} value heads are not a multiple of {key_heads} key heads"
            " (linear_num_key_heads)",
        )  # fmt: skip
    return LinearAttention(
        key_heads,
        value_heads,
        key_dim=fields.integer("linear_key_head_dim", default=128, most=MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", default=128, most=MAX_HEAD_DIM),
        width=fields.integer("linear_conv_kernel_dim", default=4, least=2, most=MAX_WIDTH),
    )
