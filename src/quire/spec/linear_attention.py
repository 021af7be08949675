"""Layers with linear attention: the sizes that a config gives them.

Such a layer caches a state of the sequence instead of its tokens. The state is the last inputs of a
short convolution and the memory of the gated delta rule (`ops/attention/base.py`).
"""

from dataclasses import dataclass, replace

from quire.spec.config_fields import Fields
from quire.spec.cuts import cut_evenly, cut_or_repeat

HYBRID_TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LINEAR = "linear_attention"
MAX_HEADS, MAX_HEAD_DIM, MAX_WIDTH = 1 << 14, 1 << 14, 1 << 8
FLOAT32S = 2  # size of a float32 element relative to one in the model's dtype


@dataclass(frozen=True)
class LinearAttention:
    """The sizes of linear attention. `value_heads` is a multiple of `key_heads`."""

    key_heads: int  # heads of the queries, and of the keys
    value_heads: int
    key_dim: int  # elements of a key head
    value_dim: int  # elements of a value head
    width: int  # convolution inputs per output

    @property
    def keys_size(self) -> int:
        """Elements of a token's queries; its keys have the same number."""
        return self.key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Elements of a token that are convolved: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    @property
    def num_inputs(self) -> int:
        """Elements of a token that enter the convolution and the delta rule."""
        return self.channels + 2 * self.value_heads

    @property
    def state_size(self) -> int:
        """Elements of a layer's state: the convolution's last inputs, and the memory."""
        return self.channels * (self.width - 1) + self.values_size * self.key_dim

    @property
    def activations(self) -> int:
        """Upper bound on a layer's activations per token, in elements of the model's dtype."""
        gates = 2 * self.value_heads
        return (2 + FLOAT32S) * self.channels + 4 * self.values_size + 4 * gates

    def of_ranks(self, num_ranks: int) -> "LinearAttention":
        """Return one rank's sizes. Raises ConfigError if the heads cannot be divided."""
        keys = cut_or_repeat(self.key_heads, 0, num_ranks, "linear_num_key_heads")
        values = cut_evenly(self.value_heads, 0, num_ranks, "linear_num_value_heads")
        return replace(self, key_heads=keys.count, value_heads=values.count)

    def parameters(self, hidden_size: int) -> int:
        """Return the number of weights in a layer's projections."""
        return hidden_size * (self.channels + 2 * self.values_size + 2 * self.value_heads)


def linear_attention(fields: Fields) -> LinearAttention:
    """Read the sizes from a config. Raises ModelError."""
    key_heads = fields.integer("linear_num_key_heads", default=16, maximum=MAX_HEADS)
    value_heads = fields.integer("linear_num_value_heads", default=32, maximum=MAX_HEADS)
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
        key_dim=fields.integer("linear_key_head_dim", default=128, maximum=MAX_HEAD_DIM),
        value_dim=fields.integer("linear_value_head_dim", default=128, maximum=MAX_HEAD_DIM),
        width=fields.integer("linear_conv_kernel_dim", default=4, minimum=2, maximum=MAX_WIDTH),
    )
