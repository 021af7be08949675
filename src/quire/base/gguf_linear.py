"""What GGUF files say of layers with linear attention, as configs write it."""

from typing import Any

from quire.base.gguf_metadata import Metadata
from quire.base.layer_windows import FULL, FULL_INTERVAL
from quire.base.linear_attention import LINEAR

RECURRENT, UNRUN_LAYERS = "attention.recurrent_layers", "nextn_predict_layers"


def layer_count(meta: Metadata) -> int:
    """Count the layers, without those behind them that guess more tokens."""
    num_blocks, others = meta.count("block_count"), meta.count(UNRUN_LAYERS, 0, least=0)
    if others >= num_blocks:
        raise meta.error(UNRUN_LAYERS, f"{others} of {num_blocks} layers (block_count)")
    return num_blocks - others


def attending_layers(meta: Metadata, num_layers: int) -> list[int]:
    """Return the layers that attend: the others have linear attention."""
    if not meta.is_array(RECURRENT):
        every = meta.count("full_attention_interval", FULL_INTERVAL)
        return [layer for layer in range(num_layers) if (layer + 1) % every == 0]
    is_linear = meta.flags(RECURRENT)
    if len(is_linear) < num_layers:
        raise meta.error(RECURRENT, f"an array of {len(is_linear)} for {num_layers} layers")
    return [layer for layer in range(num_layers) if not is_linear[layer]]


def linear_attention(meta: Metadata, sizes: dict[str, Any]) -> dict[str, Any]:
    """Read the kinds of layers and the sizes of linear attention, and hold them against the
    matrices."""
    num_layers, hidden = sizes["num_hidden_layers"], sizes["hidden_size"]
    attending = attending_layers(meta, num_layers)
    key_dim, key_heads = meta.count("ssm.state_size"), meta.count("ssm.group_count")
    inner, value_heads = meta.count("ssm.inner_size"), meta.count("ssm.time_step_rank")
    width = meta.count("ssm.conv_kernel")
    if inner % value_heads:
        raise meta.error("ssm.inner_size", f"{inner}, not a multiple of {value_heads} heads")
    linear = [layer for layer in range(num_layers) if layer not in attending]
    channels = 2 * key_dim * key_heads + inner
    meta.check_layers(linear, {"ssm_out": (hidden, inner), "ssm_conv1d": (channels, width)})
    return {
        "layer_types": [FULL if layer in attending else LINEAR for layer in range(num_layers)],
        "linear_key_head_dim": key_dim,
        "linear_num_key_heads": key_heads,
        "linear_value_head_dim": inner // value_heads,
        "linear_num_value_heads": value_heads,
        "linear_conv_kernel_dim": width,
    }
