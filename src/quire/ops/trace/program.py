"""A model's forward pass as a program of the C++ core (csrc/program.h), made from its record of
operations. It is for a CPU what a graph is for a GPU: a step is one call instead of hundreds.

Shape legend: T tokens of the step, N heads, H head dim.

The record of one forward pass over a few tokens holds every operation with its arguments. A tensor
that an operation returned becomes a buffer of the program. A view of it becomes a range of the
buffer's columns, since the first dimension of every tensor counts tokens. All buffers are float32,
whatever the model's dtype: a program does not round activations between its weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import torch

from quire.ops.adapters import AdapterSlots, ExpertAdapters
from quire.ops.attention_inputs import DeltaHeads
from quire.ops.collectives.shared_group import SharedGroup
from quire.ops.elementwise import ClampedGate
from quire.ops.host.native import address
from quire.ops.trace.program_parts import Part, ProgramParts, Reference
from quire.ops.weights.packed import ELEMENTS, PackedWeight
from quire.spec.deepseek.routing import Routing

CACHE_LINE = 16  # size in floats


class Kind(IntEnum):
    """Kinds of instructions, numbered as in csrc/program.h."""

    EMBEDDING = 0
    PACKED_ROWS = 1
    ROTARY_FACTORS = 2
    RMS_NORM = 3
    ADD_RMS_NORM = 4
    LAYER_NORM = 5
    ROTARY = 6
    SILU_MUL = 7
    GELU_MUL = 8
    GELU_TANH_MUL = 9
    SCALE = 10
    GELU = 11
    GELU_TANH = 12
    RELU = 13
    ADD = 14
    STORE = 15
    PREPARE = 16
    MULTIPLY = 17
    GATED_ADD = 18
    EXPERTS = 19
    ATTEND = 20
    CONVOLVE = 21
    DELTA_RULE = 22
    GATED_NORM = 23
    SIGMOID_MUL = 24
    ALL_REDUCE = 25
    SQUARE_SUM = 26
    RMS_NORM_BY_SUM = 27
    PLACE = 28
    ADD_FEATURES = 29
    SCALE_BY_POSITION = 30
    SCALE_BY_TOP = 31
    HEAD_PRODUCT = 32
    COPY_HEADS = 33
    ADAPT = 34


# Kinds that divide the work of all rows among threads in their own way; each is a phase.
SHARED = (
    Kind.MULTIPLY,
    Kind.EXPERTS,
    Kind.ATTEND,
    Kind.CONVOLVE,
    Kind.DELTA_RULE,
    Kind.ALL_REDUCE,
    Kind.HEAD_PRODUCT,
    Kind.ADAPT,
)
NOT_ADAPTED = -1, -1
NO_GROUPS = Routing(is_sigmoid=False, num_groups=0, num_chosen_groups=0)  # for the largest logits
NO_HEADS = DeltaHeads(0, 0, 0, 0)
OF_LAYERS = (Kind.STORE, Kind.ATTEND, Kind.CONVOLVE, Kind.DELTA_RULE)  # of a layer's memory

ReferenceOf = Callable[[torch.Tensor], Reference]


class Input(IntEnum):
    """Step inputs that an embedding looks up, numbered as in csrc/program.h."""

    IDS = 0
    POSITIONS = 1
    SEGMENTS = 2


class Untraceable(Exception):
    """Error: the record holds something that a program cannot do, so operations run one by one."""


@dataclass(frozen=True)
class View:
    """Columns of a buffer from `offset` on."""

    buffer: int
    offset: int = 0


class Route(NamedTuple):
    """The arguments of moe_route, or of moe_route_groups."""

    logits_TE: torch.Tensor
    num_chosen: int
    normalises: bool
    routing: Routing | None = None
    bias_E: torch.Tensor | None = None

    def part(self, reference_of: ReferenceOf) -> Part:
        """Return plain data for program_parts.py. The bias must outlive a program."""
        routing, bias_E = self.routing or NO_GROUPS, self.bias_E
        assert bias_E is None or bias_E.dtype == torch.float32, f"needs float32, got {bias_E.dtype}"
        return {
            "num_chosen": self.num_chosen,
            "normalises": self.normalises,
            "groups": (routing.num_groups, routing.num_chosen_groups),
            "is_sigmoid": routing.is_sigmoid,
            "scale": routing.scale,
            "route_bias": None if bias_E is None else reference_of(bias_E),
        }


@dataclass(frozen=True)
class Experts:
    """A layer's experts on this rank: experts from `first` on, of `num_all`. biases: float32, one
    per expert for up and down; empty lists without biases. adapted: where adapters change them."""

    gate_up: list[PackedWeight]
    down: list[PackedWeight]
    biases: tuple[list[torch.Tensor], list[torch.Tensor]]
    first: int
    num_all: int
    route: Route
    clamped: ClampedGate | None
    adapted: ExpertAdapters | None = None

    def part(self, reference_of: ReferenceOf) -> Part:
        """Return plain data for program_parts.py. Weights and biases must outlive a program."""
        gate_up, down = (
            [_weight(each, reference_of) for each in part] for part in (self.gate_up, self.down)
        )
        gate_up_biases, down_biases = ([*map(reference_of, each)] for each in self.biases)
        return {
            "gate_up": gate_up,
            "down": down,
            "gate_up_biases": gate_up_biases,
            "down_biases": down_biases,
            "first": self.first,
            "all": self.num_all,
            "alpha": 1.0 if self.clamped is None else self.clamped.alpha,
            "limit": 0.0 if self.clamped is None else self.clamped.limit,
            "adapted": NOT_ADAPTED if self.adapted is None else self.adapted.layers,
        } | self.route.part(reference_of)


@dataclass(frozen=True)
class Instruction:
    """Instruction of a program. csrc/program.h explains the fields and the kinds that read them.
    joins: whether it runs together with the instruction before it, of the same kind."""

    kind: Kind
    views: tuple[View, ...]
    num_written: int = 1  # number of views written, which come first
    heads: int = 1
    size: int = 0
    stride: int = 0
    layer: int = 0
    first: int = 0
    count: int = 0
    input: Input = Input.IDS
    table: torch.Tensor | None = None
    frequencies: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: float = 1.0
    soft_cap: float = 0.0
    eps: float = 0.0
    delta: DeltaHeads = NO_HEADS
    packed: PackedWeight | None = None
    group: SharedGroup | None = None
    joins: bool = False

    def part(self, begins_phase: bool, layer: int, reference_of: ReferenceOf) -> Part:
        """Return plain data for program_parts.py. Tensors and weights must outlive a program.
        layer: the layer's number in the program."""
        for tensor, dtype in (
            (self.frequencies, torch.float64),
            (self.weight, torch.float32),
            (self.bias, torch.float32),
        ):
            assert tensor is None or tensor.dtype == dtype, f"needs {dtype}, got {tensor.dtype}"
        return {
            "begins_phase": begins_phase,
            "kind": int(self.kind),
            "views": [(view.buffer, view.offset) for view in self.views],
            "heads": self.heads,
            "size": self.size,
            "stride": self.stride,
            "layer": layer,
            "first": self.first,
            "count": self.count,
            "input": int(self.input),
            "element": 0 if self.table is None else ELEMENTS[self.table.dtype],
            "table": None if self.table is None else reference_of(self.table),
            "frequencies": None if self.frequencies is None else reference_of(self.frequencies),
            "weight": None if self.weight is None else reference_of(self.weight),
            "bias": None if self.bias is None else reference_of(self.bias),
            "scale": self.scale,
            "soft_cap": self.soft_cap,
            "eps": self.eps,
            "delta": tuple(self.delta),
            "packed": None if self.packed is None else _weight(self.packed, reference_of),
            "group": None if self.group is None else self.group.core,
        }


def here(tensor: torch.Tensor) -> int:
    """Return the place of a tensor [...] in this process: its address."""
    return address(tensor, tensor.dtype)


def _weight(weight: PackedWeight, reference_of: ReferenceOf) -> tuple[tuple[int, ...], Reference]:
    return tuple(weight.layout), reference_of(weight.data)


@dataclass
class ProgramDraft:
    """Instructions and the buffers that they use. The first `num_outside` buffers are the caller's
    memory; buffer 0 is the result. widths: float32 numbers per token of each buffer. experts: of
    the layers that have any. adapters: slots that its instructions use."""

    widths: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    num_outside: int = 1
    adapters: AdapterSlots | None = None

    @property
    def phases(self) -> list[int]:
        """The phase of each instruction."""
        found: list[int] = []
        for i, instruction in enumerate(self.instructions):
            is_apart = {instruction.kind, self.instructions[i - 1].kind} & set(SHARED)
            begins = is_apart and not instruction.joins
            found.append(0 if i == 0 else found[-1] + (1 if begins else 0))
        return found

    def parts(self, layers: Mapping[int, int], reference_of: ReferenceOf) -> ProgramParts:
        """Return the data from which the core makes a program. layers: number in the program by
        layer. reference_of: returns a tensor's place."""
        offsets, width = self.offsets()
        phases, instructions = self.phases, list[Part]()
        for i, instruction in enumerate(self.instructions):
            begins = i == 0 or phases[i] != phases[i - 1]
            layer = instruction.layer
            if instruction.kind in OF_LAYERS:
                layer = layers[layer]
            instructions.append(instruction.part(begins, layer, reference_of))
        experts = [each.part(reference_of) for each in self.experts]
        return ProgramParts(self.widths, offsets, width, self.num_outside, experts, instructions)

    def offsets(self) -> tuple[list[int], int]:
        """Return where each buffer begins in the arena, in floats per token, and the arena's width.

        Memory is free again from the phase after its last use, because within a phase threads are
        not synchronised. Buffers of which threads read other threads' rows come after all others:
        the slowest cache line to write is one that several threads have read.
        """
        shared = self._read_by_all()
        own = set(range(self.num_outside, len(self.widths))) - shared
        offsets = [0] * len(self.widths)
        end_of_own = self._arrange(own, 0, offsets)
        return offsets, self._arrange(shared - set(range(self.num_outside)), end_of_own, offsets)

    def _arrange(self, buffers: set[int], begin_at: int, offsets: list[int]) -> int:
        """Place some buffers from `begin_at` on, writing to `offsets`; return the end of the
        last."""
        first, last = self._lifetimes()
        live: list[tuple[int, int, int]] = []  # begin, end, last phase
        total = begin_at
        for buffer in sorted(buffers, key=lambda b: (first[b], b)):
            live = sorted(item for item in live if item[2] >= first[buffer])
            width = -(-self.widths[buffer] // CACHE_LINE) * CACHE_LINE
            begin = begin_at
            for taken, end, _ in live:
                if begin + width <= taken:
                    break
                begin = max(begin, end)
            offsets[buffer] = begin
            live.append((begin, begin + width, last[buffer]))
            total = max(total, begin + width)
        return total

    def _read_by_all(self) -> set[int]:
        """Return the buffers of which threads read other rows than their own."""
        read = (
            view.buffer
            for instruction in self.instructions
            if instruction.kind in SHARED
            for view in instruction.views[instruction.num_written :]
        )
        return set(read)

    def _lifetimes(self) -> tuple[list[int], list[int]]:
        """Return the first and the last phase that uses each buffer."""
        first, last = [0] * len(self.widths), [0] * len(self.widths)
        for phase, instruction in zip(self.phases, self.instructions, strict=True):
            for i, view in enumerate(instruction.views):
                if i < instruction.num_written and not first[view.buffer]:
                    first[view.buffer] = phase
                last[view.buffer] = phase
        return first, last
