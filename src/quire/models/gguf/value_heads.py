"""The order in which GGUF files of Qwen 3.5 hold the heads of values of linear attention. No torch.

Checkpoints have the value heads of a key head side by side; files have the first of each key head,
then the second of each, and so on. What belongs to value heads is rows of most tensors, and columns
of the output's matrix: these can be moved only as whole blocks of a quantised format.
"""

import re

import numpy as np
import numpy.typing as npt

from quire.spec.gguf.container import KINDS, TensorKind, TensorPlace
from quire.spec.model_spec import ModelSpec

Order = npt.NDArray[np.int64]

REORDERED = ("qwen3_5_text", "qwen3_5_moe_text")
# The sizes of a head's part: one number, or a vector; of some behind queries and keys.
NUMBERS = re.compile(r"blk\.\d+\.(ssm_a|ssm_dt\.bias|ssm_(alpha|beta)\.weight)")
VECTORS = re.compile(r"blk\.\d+\.attn_gate\.weight")
BEHIND_KEYS = re.compile(r"blk\.\d+\.(attn_qkv|ssm_conv1d)\.weight")
COLUMNS = re.compile(r"blk\.\d+\.ssm_out\.weight")


def row_order(name: str, spec: ModelSpec) -> Order | None:
    """Return which of the file's rows each row of a checkpoint's tensor is; None: the same."""
    if not _is_reordered(spec):
        return None
    sizes = spec.linear_attention
    if NUMBERS.fullmatch(name):
        return _order(spec, 1)
    if VECTORS.fullmatch(name):
        return _order(spec, sizes.value_dim)
    if BEHIND_KEYS.fullmatch(name):
        first = 2 * sizes.keys_size
        return np.concatenate((np.arange(first), first + _order(spec, sizes.value_dim)))
    return None


def column_order(name: str, spec: ModelSpec) -> Order | None:
    """Do that with columns."""
    if _is_reordered(spec) and COLUMNS.fullmatch(name):
        return _order(spec, spec.linear_attention.value_dim)
    return None


def kept_kind(place: TensorPlace, spec: ModelSpec) -> TensorKind:
    """Tell how a tensor is stored when its columns stand in a checkpoint's order: in plain numbers
    where a block holds numbers of several heads."""
    if column_order(place.name, spec) is None:
        return place.kind
    fits = spec.linear_attention.value_dim % place.kind.block_size == 0
    return place.kind if fits else KINDS[0]


def _is_reordered(spec: ModelSpec) -> bool:
    if spec.model_type not in REORDERED or not spec.linear_layers:
        return False
    return spec.linear_attention.value_heads != spec.linear_attention.key_heads


def _order(spec: ModelSpec, size: int) -> Order:
    """Order parts of so many numbers of each value head."""
    sizes = spec.linear_attention
    heads_N = np.arange(sizes.value_heads).reshape(-1, sizes.key_heads).T.reshape(-1)
    order: Order = (heads_N[:, None] * size + np.arange(size)).reshape(-1)
    return order
