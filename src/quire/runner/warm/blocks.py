"""Keys and values of a runner without torch: the same memory as `KVMemory`'s."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.ops.attention.core_calls import kv_layer
from quire.ops.host.native_types import CoreKV
from quire.ops.host.pages import zeros
from quire.spec.cache_group import CacheGroup
from quire.spec.model_spec import DTYPE_BYTES

Int32 = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


class LayerPosition(NamedTuple):
    """Position of a layer's keys and values. given: index of its cache group among a step's groups.
    group: number of that group. layer: the layer's number in it."""

    given: int
    group: int
    layer: int


class WarmBlocks:
    """KV blocks without torch. kv_format: `auto` is the dtype. data: bytes of each group's blocks;
    new ones use no memory until they are written."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        dtype: str,
        kv_format: str,
        data: Sequence[Bytes] | None = None,
    ) -> None:
        self.groups, self._num_blocks, self.block_size = groups, num_blocks, block_size
        self._format = dtype if kv_format == "auto" else kv_format
        size = DTYPE_BYTES[dtype] if kv_format == "auto" else 1
        shapes = [
            group.memory_shape(num, block_size, kv_format)
            for group, num in zip(groups, num_blocks, strict=True)
        ]
        self.data = data or [zeros(math.prod(shape) * size) for shape in shapes]
        self._blocks = [
            data.reshape(*shape[:4], -1) for data, shape in zip(self.data, shapes, strict=True)
        ]

    def layer(self, position: LayerPosition) -> CoreKV:
        """Return a layer's keys and values in the core's form."""
        keys, values = self._blocks[position.group][:, position.layer]
        return kv_layer(
            self.groups[position.group],
            self._num_blocks[position.group],
            self.block_size,
            self._format,
            (keys.ctypes.data, values.ctypes.data),
        )

    def copy_blocks(self, group: int, source: Int32, destination: Int32) -> None:
        """Copy whole blocks in all layers of a group; all are read before any is written."""
        blocks = self._blocks[group]
        blocks[:, :, :, destination] = blocks[:, :, :, source]
