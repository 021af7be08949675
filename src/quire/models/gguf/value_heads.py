"""Reorder the value heads of linear attention in GGUF files of Qwen 3.5. No torch.

Checkpoints group the value heads by key head. GGUF files hold the first value head of each key
head, then the second of each, and so on. Value heads are rows of most tensors. In the output's
matrix they are columns, which can be moved only as whole blocks of a quantised format.
"""

import re

import numpy as np
import numpy.typing as npt

from quire.spec.gguf.container import KINDS, TensorEntry, TensorKind
from quire.spec.model_spec import ModelSpec

Order = npt.NDArray[np.int64]

REORDERED = ("qwen3_5_text", "qwen3_5_moe_text")
# Tensors with a number or a vector per value head. AFTER_KEYS: after the rows of queries and keys.
NUMBERS = re.compile(r"blk\.\d+\.(ssm_a|ssm_dt\.bias|ssm_(alpha|beta)\.weight)")
VECTORS = re.compile(r"blk\.\d+\.attn_gate\.weight")
AFTER_KEYS = re.compile(r"blk\.\d+\.(attn_qkv|ssm_conv1d)\.weight")
COLUMNS = re.compile(r"blk\.\d+\.ssm_out\.weight")


def row_order(name: str, spec: ModelSpec) -> Order | None:
    """Return the file's row for each row of the checkpoint's tensor, [rows]; None if unchanged."""
    if not _is_reordered(spec):
        return None
    sizes = spec.linear_attention
    if NUMBERS.fullmatch(name):
        return _order(spec, 1)
    if VECTORS.fullmatch(name):
        return _order(spec, sizes.value_dim)
    if AFTER_KEYS.fullmatch(name):
        first = 2 * sizes.keys_size
        return np.concatenate((np.arange(first), first + _order(spec, sizes.value_dim)))
    return None


def column_order(name: str, spec: ModelSpec) -> Order | None:
    """Return the file's column for each column of the checkpoint's tensor; None if unchanged."""
    if _is_reordered(spec) and COLUMNS.fullmatch(name):
        return _order(spec, spec.linear_attention.value_dim)
    return None


def stored_kind(place: TensorEntry, spec: ModelSpec) -> TensorKind:
    """Return the format of a tensor after its columns are reordered. It is float32 if blocks hold
    numbers of several heads, else the file's format."""
    if column_order(place.name, spec) is None:
        return place.kind
    fits = spec.linear_attention.value_dim % place.kind.block_size == 0
    return place.kind if fits else KINDS[0]


def _is_reordered(spec: ModelSpec) -> bool:
    if spec.model_type not in REORDERED or not spec.linear_layers:
        return False
    return spec.linear_attention.value_heads != spec.linear_attention.key_heads


def _order(spec: ModelSpec, size: int) -> Order:
    """Return the file's index of each element in checkpoint order; `size` elements per head."""
    sizes = spec.linear_attention
    heads_N = np.arange(sizes.value_heads).reshape(-1, sizes.key_heads).T.reshape(-1)
    order: Order = (heads_N[:, None] * size + np.arange(size)).reshape(-1)
    return order
