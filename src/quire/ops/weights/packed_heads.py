"""Weights of products per head, in the order that the C++ core multiplies (csrc/head_products.h).

Shape legend: N heads, O outputs and I inputs of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from quire.ops.host.native_types import WeightLayout
from quire.ops.weights.opaque import OpaqueWeight
from quire.ops.weights.pack import bytes_of, known_layout, pack
from quire.ops.weights.packed import PackedWeight


@dataclass(frozen=True, eq=False)
class PackedHeads(OpaqueWeight):
    """Weights [N, O, I] of equal layout, each packed by itself. data: uint8, the heads one after
    the other. layout: of one head."""

    data: torch.Tensor
    layout: WeightLayout

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, outputs and inputs."""
        heads = self.data.numel() // bytes_of(self.layout)
        return heads, self.layout.outputs, self.layout.inputs

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @cached_property
    def parts(self) -> tuple[PackedWeight, ...]:
        """The weight of each head."""
        pieces = self.data.split(bytes_of(self.layout))
        return tuple(PackedWeight(piece, self.layout) for piece in pieces)


def pack_heads(weight_NOI: torch.Tensor, variant: str | None = None) -> PackedHeads:
    """Pack the weights of all heads, [N, O, I], in their own dtype."""
    packed = [pack(weight_OI, None, variant) for weight_OI in weight_NOI]
    return PackedHeads(torch.cat([each.data for each in packed]), packed[0].layout)


def heads_view(data: torch.Tensor, numbers: Sequence[int]) -> PackedHeads:
    """Make the packed weights of heads from their bytes, uint8 [num_bytes]. numbers: the layout of
    each. Raises ValueError for a layout that packing does not produce here, or of another size."""
    layout = known_layout(numbers)
    if len(data) == 0 or len(data) % bytes_of(layout):
        raise ValueError(f"packed weights of {numbers} are not what they should be")
    return PackedHeads(data, layout)
