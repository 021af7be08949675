"""Block memory of a backend's cache groups, and moves of whole blocks.

Shape legend: Y layers of a group, K KV heads, B blocks, P tokens per block, H head dim.
Keys and values of a group have the layout [2, Y, K, B, P, H], latent vectors [1, Y, 1, B, P, L].
Within a block the C++ core orders
keys differently (csrc/attention.h).
"""

import torch

from quire.ops.attention.base import AttentionBackend, KVLayout
from quire.ops.attention_inputs import Int32
from quire.ops.blocks.block_moves import copy_blocks
from quire.ops.blocks.host_blocks import HostBlocks
from quire.ops.host.host_memory import lazy_zeros
from quire.ops.precision import accumulation_dtype
from quire.spec.cache_group import STATE, STEP, CacheGroup


class KVMemory:
    """Block memory of all cache groups on the device and on the host.

    kv[g]: tensor of group g, zeros that occupy no memory before they are written. For int8 and fp8
    it holds bytes; an int8 row is H values, and a scale elsewhere in its block. A group of states
    has [1, Y, 1, B, 1, state_size]. All layers of a STEP group share one layer's memory.
    place[layer]: (group, index in the group). host: host-memory blocks, by group.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.kv = [_zeros_or_given(layout, g) for g in range(len(layout.groups))]
        self.location = {
            layer: (g, 0 if group.kind == STEP else index)
            for g, group in enumerate(layout.groups)
            for index, layer in enumerate(group.layers)
        }
        self.host = HostBlocks(self.kv, dim=3, num_blocks=layout.num_host_blocks)

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy whole blocks in all layers of the group, without waiting. A GPU needs one launch,
        unless a block is both read and written."""
        copy_blocks(self.kv[group], source, destination, dim=3)


class MovesBlocks(AttentionBackend):
    """Base of backends with a KVMemory; it copies whole blocks."""

    _memory: KVMemory

    @property
    def blocks(self) -> list[torch.Tensor]:
        """Blocks of each cache group (`KVMemory.kv`)."""
        return self._memory.kv

    @property
    def host_blocks(self) -> HostBlocks:
        """Host-memory blocks, which stores read and write."""
        return self._memory.host

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy whole blocks in all layers of the group."""
        if self._has_layers(group):
            self._memory.copy_blocks(group, source, destination)

    def swap_out(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy device blocks of a group to blocks of host memory."""
        if self._has_layers(group):
            self._memory.host.swap_out(group, source, destination)

    def load(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy blocks of host memory to device blocks of a group."""
        if self._has_layers(group):
            self._memory.host.load(group, source, destination)

    def _has_layers(self, group: int) -> bool:
        """Return whether this stage has a layer of the group."""
        return self._memory.kv[group].numel() > 0


def _zeros_or_given(layout: KVLayout, g: int) -> torch.Tensor:
    group, num_blocks = layout.groups[g], layout.num_blocks[g]
    shape = group.memory_shape(num_blocks, layout.block_size, layout.kv_format)
    dtype = _dtype(group, layout)
    if not layout.given:
        return lazy_zeros(shape, dtype, layout.device)
    return torch.from_numpy(layout.given[g]).view(dtype).view(shape)


def _dtype(group: CacheGroup, layout: KVLayout) -> torch.dtype:
    if group.kind == STATE:
        return accumulation_dtype(layout.dtype)
    return layout.dtype if layout.kv_format == "auto" else torch.uint8
