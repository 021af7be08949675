"""Data from which a program of the C++ core is made (csrc/program.h). This module needs no torch.

Instead of an address, the data hold a place. It is the address itself, or a value from which the
reader makes the address, so that the data can be saved. A packed weight is a layout and a place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.ops.host.native import needed_core
from quire.ops.host.native_types import CoreProgram, CoreWeight, WeightLayout

Reference = Any
WeightReference = tuple[Sequence[int], Reference]
Part = dict[str, Any]

NO_WEIGHT = WeightLayout(0, 0, 0, 0, 1)
REFERENCES = ("table", "frequencies", "weight", "bias")  # an instruction's, or None


@dataclass(frozen=True)
class ProgramParts:
    """Data of a program. widths: float32 numbers per token of each buffer. places: where each
    buffer begins in the arena, in floats per token. arena: its width. num_outside: buffers of the
    caller. experts, instructions: keyword arguments of the core's functions."""

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
        address: Callable[[Reference], int],
    ) -> CoreProgram:
        """Make the program; the memory at its addresses must outlive it. variant: attention's
        instruction set. add_layers: adds the memory of all layers. address: looks up a place."""
        program = needed_core().Program(self.widths, self.places, self.arena, variant)
        add_layers(program)
        for part in self.experts:
            biases = {key: [*map(address, part[key])] for key in part if key.endswith("_biases")}
            weights = {
                key: [_weight(each, address) for each in part[key]] for key in ("gate_up", "down")
            }
            bias = 0 if part["route_bias"] is None else address(part["route_bias"])
            program.add_experts(**(part | weights | biases | {"route_bias": bias}))
        for part in self.instructions:
            found = {key: 0 if part[key] is None else address(part[key]) for key in REFERENCES}
            program.add(**(part | found | {"packed": _weight(part["packed"], address)}))
        return program


def _weight(part: WeightReference | None, address: Callable[[Reference], int]) -> CoreWeight:
    if part is None:
        return NO_WEIGHT.at(0, needed_core())
    layout, reference = part
    return WeightLayout(*layout).at(address(reference), needed_core())
