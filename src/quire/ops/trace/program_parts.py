"""What a program of the C++ core is made of (csrc/program.h), as plain data. No torch.

Where the core wants an address stands a place: the address itself, or whatever else its reader
makes one of, so that the data can be kept in a file. A packed weight is its layout and its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.ops.host.native import needed_core
from quire.ops.host.native_types import CoreProgram, CoreWeight, WeightLayout

Place = Any
PlacedWeight = tuple[Sequence[int], Place]
Part = dict[str, Any]

NO_WEIGHT = WeightLayout(0, 0, 0, 0, 1)
PLACES = ("table", "frequencies", "weight", "bias")  # of an instruction, None where there is none


@dataclass(frozen=True)
class ProgramParts:
    """widths, places: of the buffers, and where each begins in the arena, in floats per token.
    experts, instructions: keyword arguments of the core's functions. num_outside: buffers that are
    the caller's."""

    widths: list[int]
    places: list[int]
    arena: int
    num_outside: int
    experts: list[Part]
    instructions: list[Part]

    def assemble(
        self,
        variant: int,
        add_layers: Callable[[CoreProgram], None],
        address: Callable[[Place], int],
    ) -> CoreProgram:
        """Make the program; what stands at its addresses must outlive it. variant: of attention.
        add_layers: adds the memory of all layers. address: finds it for a place."""
        program = needed_core().Program(self.widths, self.places, self.arena, variant)
        add_layers(program)
        for part in self.experts:
            biases = {key: [*map(address, part[key])] for key in part if key.endswith("_biases")}
            weights = {
                key: [_weight(each, address) for each in part[key]] for key in ("gate_up", "down")
            }
            program.add_experts(**(part | weights | biases))
        for part in self.instructions:
            found = {key: 0 if part[key] is None else address(part[key]) for key in PLACES}
            program.add(**(part | found | {"packed": _weight(part["packed"], address)}))
        return program


def _weight(part: PlacedWeight | None, address: Callable[[Place], int]) -> CoreWeight:
    if part is None:
        return NO_WEIGHT.at(0, needed_core())
    layout, place = part
    return WeightLayout(*layout).at(address(place), needed_core())
