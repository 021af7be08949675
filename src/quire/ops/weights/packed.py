"""Weights of linear layers in the order in which the C++ core multiplies; `pack.py` makes them.

Shape legend: K inputs, N outputs, U looked-up rows. The layout is defined in csrc/linear.h. It
depends on the variant: the fastest instruction set for the format here (kernel_choice.py).
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from quire.ops.host.native import address, needed_core
from quire.ops.host.native_types import CoreWeight, WeightLayout
from quire.ops.weights.formats import NAMES, variant_numbers
from quire.ops.weights.opaque import OpaqueWeight

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, eq=False)
class PackedWeight(OpaqueWeight):
    """Weight [N, K] of one format, in the core's order. data: uint8."""

    data: torch.Tensor
    layout: WeightLayout

    @property
    def parts(self) -> tuple["PackedWeight", ...]:
        return (self,)

    @property
    def format(self) -> str:
        return NAMES[self.layout.format]

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.outputs, self.layout.inputs

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def serves_look_up(self) -> bool:
        """Whether an embedding may look up rows; weights of 4 bits are too coarse for that."""
        return self.format not in ("int4", "int4_multiples")

    @property
    def variant(self) -> str:
        return variant_of(self.layout)

    @cached_property
    def core(self) -> CoreWeight:
        """The weight as the core's type. It does not hold the memory of `data`."""
        return self.layout.at(address(self.data, torch.uint8), needed_core())

    def rows(self, ids_U: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return rows [U, K], dequantised, zeros for negative ids. ids: int64 outputs."""
        known_U = ids_U.clamp(min=0)
        out_UK = torch.empty(len(ids_U), self.shape[1], dtype=dtype)
        needed_core().linear_unpack_rows(
            address(out_UK, dtype),
            ELEMENTS[dtype],
            address(known_U, torch.int64),
            len(ids_U),
            self.core,
        )
        return out_UK.masked_fill_(ids_U[:, None] < 0, 0.0)


@dataclass(frozen=True, eq=False)
class PackedParts(OpaqueWeight):
    """Weights of several formats with equal inputs and consecutive outputs, as of a merged layer
    whose parts a file stores differently. data: the bytes of all parts."""

    data: torch.Tensor
    parts: tuple[PackedWeight, ...]

    @property
    def format(self) -> str:
        return ", ".join(part.format for part in self.parts)

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Packed = PackedWeight | PackedParts


def variant_of(layout: WeightLayout) -> str:
    """Return the name of a layout's variant."""
    [name] = [name for name, number in variant_numbers().items() if number == layout.variant]
    return name
