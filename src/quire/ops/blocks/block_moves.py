"""Copy, gather and scatter of whole blocks of a KV tensor. Each is one launch on a GPU with triton,
and torch's operations elsewhere.

`dim` is the dimension that counts a tensor's blocks. Block ids on the device are contiguous int32
or int64.
"""

import numpy as np
import torch

from quire.ops import gpu
from quire.ops.blocks.streams import Int32, device_ids
from quire.ops.rows.row_arrays import last_writes


def copy_blocks(kv: torch.Tensor, source: Int32, destination: Int32, dim: int) -> None:
    """Copy blocks `source` of kv [..., B, ...] to blocks `destination`; the host has the ids. All
    blocks are read before any is written. Of several writes to one block, the last one counts."""
    if not gpu.is_on_gpu(kv):
        read = torch.as_tensor(source, dtype=torch.int64, device=kv.device)
        write = torch.as_tensor(destination, dtype=torch.int64, device=kv.device)
        kv.index_copy_(dim, write, kv.index_select(dim, read))
        return
    kernels = gpu.kernels_for(kv, "attention.blocks", any_dtype=True)
    if kernels is not None and kernels.can_copy_at_once(source, destination):
        kernels.copy_blocks(kv, device_ids(np.stack((source, destination)), kv.device), dim)
        return
    last = last_writes(destination)
    pairs_2N = device_ids(np.stack((source[last], destination[last])), kv.device)
    shape = (len(last), *kv.shape[:dim], *kv.shape[dim + 1 :])
    blocks = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    gather_blocks(kv, pairs_2N[0], dim, blocks)
    scatter_blocks(kv, pairs_2N[1], dim, blocks)


def gather_blocks(kv: torch.Tensor, blocks_N: torch.Tensor, dim: int, out: torch.Tensor) -> None:
    """Write blocks of kv to `out`, [N, ...], each contiguous."""
    kernels = gpu.kernels_for(kv, "attention.blocks", any_dtype=True)
    if kernels is not None:
        kernels.gather_blocks(kv, blocks_N, dim, out)
    else:
        out.copy_(kv.index_select(dim, blocks_N).movedim(dim, 0))


def scatter_blocks(
    kv: torch.Tensor, blocks_N: torch.Tensor, dim: int, values: torch.Tensor
) -> None:
    """Write values [N, ...], as gather_blocks returns them, to distinct blocks of kv."""
    kernels = gpu.kernels_for(kv, "attention.blocks", any_dtype=True)
    if kernels is not None:
        kernels.scatter_blocks(kv, blocks_N, values, dim)
    else:
        kv.index_copy_(dim, blocks_N.long(), values.movedim(0, dim))
