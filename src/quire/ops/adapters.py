"""Low-rank additions to linear layers (LoRA): out += scale * (x A^T) B^T, for rows of an adapter.

Shape legend: T tokens, K inputs, O outputs of a layer, N outputs of a part, R rank of a part.

A device has a few slots for adapters. Each step says which of its rows use which slot. The rows of
one adapter are computed together, with the adapter's own rank. On a CPU the C++ core
(csrc/adapters.h) does this within the recorded program. Other rows cost nothing there, and a row
has the same bits alone and in any batch. The rows of an expert in a mixture are grouped by adapter,
too. On a GPU kernels do it (kernels/products/adapters.py), and experts have no adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from quire.ops.host.native import address, core
from quire.ops.host.native_types import CoreAdapter, CoreAdapters
from quire.ops.host.pages import aligned, zeros
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


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter in memory. core: the parts for the C++ core, at the same addresses; None without
    the core, or if no program computes in their dtype."""

    parts: AdapterParts
    core: CoreAdapter | None = None


EMPTY = LoadedAdapter({})


@dataclass(frozen=True)
class LayerSize:
    """Numbers of inputs and of each module's outputs, of modules that adapters may change.
    is_aligned: whether the first output of each is a multiple of 16."""

    inputs: int
    outputs: tuple[int, ...]
    is_aligned: bool


class Slots(Protocol):
    """Adapters in the slots of a device, as a model and its loader see them: `AdapterSlots`, or
    `DeviceSlots` on a GPU (runner/gpu/adapters.py). is_idle: whether the current step skips
    `add`."""

    is_idle: bool

    def prepare(self, parts: AdapterParts) -> Any:
        """Return an adapter that `put` takes at once. Any thread may call this."""
        ...

    def add(self, out_TO: torch.Tensor, x_TK: torch.Tensor, layer: int) -> None:
        """Add to the outputs [T, O] of the rows that use adapters, for inputs [T, K]."""
        ...


class AdapterSlots:
    """Adapters in the slots of a CPU, and the rows of the current step that use them."""

    is_idle = False  # the core's program of a step is the same with and without adapters

    def __init__(self, num_slots: int, num_layers: int) -> None:
        self._slots, self._num_layers = [EMPTY] * num_slots, num_layers
        self._groups: Sequence[Group] = ()
        native = core()
        self.core: CoreAdapters | None = None if native is None else native.Adapters(num_slots)

    def prepare(self, parts: AdapterParts) -> LoadedAdapter:
        """Return an adapter that `put` takes at once. Any thread may call this."""
        native = core()
        elements = {ELEMENTS.get(own[0].down_RK.dtype) for own in parts.values()}
        if native is None or None in elements:
            return LoadedAdapter(parts)
        made, parts = native.Adapter(self._num_layers), _in_one_piece(parts)
        for layer, own in parts.items():
            [*numbers] = map(_numbers, own)
            down_RK = own[0].down_RK
            made.set(layer, ELEMENTS[down_RK.dtype], down_RK.shape[1], numbers)
        return LoadedAdapter(parts, made)

    def put(self, slot: int, adapter: LoadedAdapter) -> None:
        """Replace the adapter of a slot, which no current or later row uses until then."""
        self._slots[slot] = adapter
        if self.core is not None:
            self.core.put(slot, adapter.core)

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
            if own := self._slots[slot].parts.get(layer):
                _add_parts(out_TO, x_TK, own, torch.tensor(rows, device=x_TK.device))

    def add_to_pairs(
        self, out_PO: torch.Tensor, x_PK: torch.Tensor, layer: int, tokens_P: torch.Tensor
    ) -> None:
        """Add to the outputs [P, O] of one expert's rows, for inputs [P, K]. tokens: the step's
        token of each row."""
        for slot, rows in self._groups:
            if own := self._slots[slot].parts.get(layer):
                used_T = torch.tensor(rows, device=tokens_P.device)
                rows_G = torch.isin(tokens_P, used_T).nonzero().flatten()
                if len(rows_G):
                    _add_parts(out_PO, x_PK, own, rows_G)


def _add_parts(
    out_TO: torch.Tensor, x_TK: torch.Tensor, parts: Sequence[AdapterPart], rows_G: torch.Tensor
) -> None:
    x_GK = x_TK[rows_G]
    for part in parts:
        added_GN = (x_GK @ part.down_RK.T * part.scale) @ part.up_RN
        end = part.first + added_GN.shape[1]
        out_TO[rows_G, part.first : end] += added_GN


def _in_one_piece(parts: AdapterParts) -> AdapterParts:
    """Copy an adapter's matrices, in the order of a step, into one piece of memory. It has large
    pages, so that reading it takes less time."""
    matrices = [each for own in parts.values() for part in own for each in _matrices(part)]
    memory = torch.from_numpy(zeros(sum(aligned(each.nbytes) for each in matrices)))
    at = 0

    def copied(matrix: torch.Tensor) -> torch.Tensor:
        nonlocal at
        begin, at = at, at + aligned(matrix.nbytes)
        place = memory[begin : begin + matrix.nbytes].view(matrix.dtype).view(matrix.shape)
        return place.copy_(matrix)

    return {
        layer: [
            replace(part, down_RK=copied(part.down_RK), up_RN=copied(part.up_RN)) for part in own
        ]
        for layer, own in sorted(parts.items())
    }


def _matrices(part: AdapterPart) -> tuple[torch.Tensor, torch.Tensor]:
    return part.down_RK, part.up_RN


def _numbers(part: AdapterPart) -> tuple[int, int, int, int, int, float]:
    """Return a part as the core reads it."""
    down_RK, up_RN = part.down_RK, part.up_RN
    addresses = address(down_RK, down_RK.dtype), address(up_RN, up_RN.dtype)
    return *addresses, len(down_RK), part.first, up_RN.shape[1], part.scale


@dataclass(frozen=True)
class ExpertAdapters:
    """Where adapters change the experts of a mixture. layers: numbers of the first expert's layers
    among the adapted ones, gate and up and then down; expert e has the e-th after them."""

    slots: AdapterSlots
    layers: tuple[int, int]

    def add(
        self,
        which: int,
        expert: int,
        out_PO: torch.Tensor,
        x_PK: torch.Tensor,
        rows_P: torch.Tensor,
    ) -> None:
        """Add to the outputs [P, O] of an expert, for inputs [P, K]. which: 0 for gate and up, 1
        for down. rows: the step's token of each row."""
        self.slots.add_to_pairs(out_PO, x_PK, self.layers[which] + expert, rows_P)


@op("add_adapters")
def add_adapters(out_TO: torch.Tensor, x_TK: torch.Tensor, slots: Slots, layer: int) -> None:
    """Add the current adapters' change of a layer to its outputs [T, O], for inputs [T, K]. layer:
    the layer's number among the adapted ones."""
    slots.add(out_TO, x_TK, layer)
