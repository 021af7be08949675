"""Low-rank additions to linear layers (LoRA): out += scale * (x A^T) B^T, for rows of an adapter.

Shape legend: T tokens, K inputs, O outputs of a layer, N outputs of a part, R rank of a part.

A device has a few slots for adapters. Each step says which of its rows use which slot. The rows of
one adapter are computed together, with the adapter's own rank. Other rows cost nothing. On a CPU
the C++ core (csrc/adapters.h) does this within the recorded program, and a row has the same bits
alone and in any batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.ops.host.native import address, core
from quire.ops.host.native_types import CoreAdapters
from quire.ops.registry import op
from quire.ops.weights.packed import ELEMENTS

Group = tuple[int, Sequence[int]]  # a slot, and the step's rows that use the adapter in it


@dataclass(frozen=True)
class AdapterPart:
    """An adapter's change of some outputs of a layer, from `first` on. down: A [R, K]. up: B^T
    [R, N]. Both are contiguous."""

    first: int
    down_RK: torch.Tensor
    up_RN: torch.Tensor
    scale: float


AdapterParts = Mapping[int, Sequence[AdapterPart]]  # an adapter's parts, by number of the layer


class AdapterSlots:
    """Adapters in the slots of a device, and the rows of the current step that use them."""

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self._slots: list[AdapterParts] = [{}] * num_slots
        self._groups: Sequence[Group] = ()
        native = core()
        self.core: CoreAdapters | None = None
        if native is not None:
            self.core = native.Adapters(num_slots, num_layers)

    def put(self, slot: int, parts: AdapterParts) -> None:
        """Replace the adapter of a slot, which no current or later row uses until then."""
        self._slots[slot] = parts
        if self.core is None:
            return
        self.core.clear(slot)
        for layer, own in parts.items():
            element = ELEMENTS.get(own[0].down_RK.dtype)
            if element is None:  # no program computes in this dtype
                return
            numbers = [
                (
                    address(part.down_RK, part.down_RK.dtype),
                    address(part.up_RN, part.up_RN.dtype),
                    len(part.down_RK),
                    part.first,
                    part.up_RN.shape[1],
                    part.scale,
                )
                for part in own
            ]
            self.core.set(slot, layer, element, own[0].down_RK.shape[1], numbers)

    def begin_step(self, groups: Sequence[Group]) -> None:
        """Set the rows of the next steps that use adapters; a row is in one group at most."""
        if not groups and not self._groups:
            return
        self._groups = groups
        if self.core is not None:
            self.core.begin_step([(slot, list(rows)) for slot, rows in groups])

    def add(self, out_TO: torch.Tensor, x_TK: torch.Tensor, layer: int) -> None:
        """Add to the outputs [T, O] of the groups' rows, for inputs [T, K]: the reference of the
        core's code."""
        for slot, rows in self._groups:
            own = self._slots[slot].get(layer, ())
            if not own:
                continue
            rows_G = torch.tensor(rows, device=x_TK.device)
            x_GK = x_TK[rows_G]
            for part in own:
                added_GN = (x_GK @ part.down_RK.T * part.scale) @ part.up_RN
                end = part.first + added_GN.shape[1]
                out_TO[rows_G, part.first : end] += added_GN


@op("add_adapters")
def add_adapters(out_TO: torch.Tensor, x_TK: torch.Tensor, slots: AdapterSlots, layer: int) -> None:
    """Add the current adapters' change of a layer to its outputs [T, O], for inputs [T, K]. layer:
    the layer's number among the adapted ones."""
    slots.add(out_TO, x_TK, layer)
