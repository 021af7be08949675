"""A model's forward pass as a program of the C++ core (csrc/program.h), made from its record of
operations: what a graph is to a GPU. A step is then one call instead of hundreds of operations.

Shape legend: T tokens of the step, N heads, H head dim.

The record of one forward pass over a few tokens holds every operation with its arguments. A tensor
that an operation returned is a buffer of the program; a view of it is some of the buffer's columns,
since the first dimension of all of them counts tokens. All buffers are float32, whatever the
model's dtype: between its weights, a program rounds nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

import torch

from quire.ops.attention.base import DeltaHeads
from quire.ops.clamped_gate import ClampedGate
from quire.ops.formats import rounds_activations
from quire.ops.linear import Weight
from quire.ops.native import address, needed_core
from quire.ops.native_types import CoreProgram, CoreWeight, WeightLayout
from quire.ops.packed import ELEMENTS, PackedParts, PackedWeight
from quire.ops.registry import OpRecord

CACHE_LINE = 16  # floats


class Kind(IntEnum):
    """As in csrc/program.h."""

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


# Kinds whose threads share the work of all rows in a way of their own: a phase each.
SHARED = (Kind.MULTIPLY, Kind.EXPERTS, Kind.ATTEND, Kind.CONVOLVE, Kind.DELTA_RULE)
NO_HEADS = DeltaHeads(0, 0, 0, 0)
NO_WEIGHT = WeightLayout(0, 0, 0, 0, 1)


class Input(IntEnum):
    """As in csrc/program.h."""

    IDS = 0
    POSITIONS = 1


class Untraceable(Exception):
    """The record holds something that a program cannot do; operations must be called one by one."""


@dataclass(frozen=True)
class View:
    """Columns of a buffer from `offset` on."""

    buffer: int
    offset: int = 0


@dataclass(frozen=True)
class Experts:
    """Those of a layer. biases: float32, of each expert; none where there are none."""

    gate_up: list[PackedWeight]
    down: list[PackedWeight]
    biases: tuple[list[torch.Tensor], list[torch.Tensor]]
    num_chosen: int
    normalises: bool
    clamped: ClampedGate | None

    def add_to(self, program: CoreProgram) -> None:
        """Add them to the core's program. Their weights and biases must outlive that."""
        gate_up_biases, down_biases = ([*map(_address, each)] for each in self.biases)
        program.add_experts(
            gate_up=[weight.core for weight in self.gate_up],
            down=[weight.core for weight in self.down],
            gate_up_biases=gate_up_biases,
            down_biases=down_biases,
            num_chosen=self.num_chosen,
            normalises=self.normalises,
            alpha=1.0 if self.clamped is None else self.clamped.alpha,
            limit=0.0 if self.clamped is None else self.clamped.limit,
        )


@dataclass(frozen=True)
class Instruction:
    """One step of a program. csrc/program.h says what the fields are and which a kind reads."""

    kind: Kind
    views: tuple[View, ...]
    num_written: int = 1  # of the views, the first ones
    heads: int = 1
    size: int = 0
    stride: int = 0
    layer: int = 0
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

    def add_to(self, program: CoreProgram, begins_phase: bool) -> None:
        """Add it to the core's program. Its tensors and weight must outlive that."""
        program.add(
            begins_phase=begins_phase,
            kind=self.kind,
            views=[(view.buffer, view.offset) for view in self.views],
            heads=self.heads,
            size=self.size,
            stride=self.stride,
            layer=self.layer,
            input=self.input,
            element=0 if self.table is None else ELEMENTS[self.table.dtype],
            table=_address(self.table),
            frequencies=_address(self.frequencies, torch.float64),
            weight=_address(self.weight, torch.float32),
            bias=_address(self.bias, torch.float32),
            scale=self.scale,
            soft_cap=self.soft_cap,
            eps=self.eps,
            delta=self.delta,
            packed=_core_weight(self.packed),
        )


def _address(tensor: torch.Tensor | None, dtype: torch.dtype | None = None) -> int:
    return 0 if tensor is None else address(tensor, dtype or tensor.dtype)


def _all_packed(weights: Sequence[Weight]) -> list[PackedWeight]:
    packed = [each for each in weights if isinstance(each, PackedWeight)]
    if len(packed) < len(weights):
        raise Untraceable("the weights of experts are not packed for the core")
    return packed


def _core_weight(weight: PackedWeight | None) -> CoreWeight:
    return NO_WEIGHT.at(0, needed_core()) if weight is None else weight.core


@dataclass
class ProgramDraft:
    """Instructions over buffers, of which the first are memory of the caller: buffer 0 the result.
    widths: float32 per token. experts: of the layers that have any."""

    widths: list[int] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    experts: list[Experts] = field(default_factory=list)
    num_outside: int = 1

    @property
    def phases(self) -> list[int]:
        """The phase of each instruction."""
        found: list[int] = []
        for i, instruction in enumerate(self.instructions):
            joins = i > 0 and not {instruction.kind, self.instructions[i - 1].kind} & set(SHARED)
            found.append(0 if i == 0 else found[-1] + (0 if joins else 1))
        return found

    def places(self) -> tuple[list[int], int]:
        """Find where each buffer begins in the arena, in floats per token, and the arena's width.

        A place is free again from the phase after the last that uses it: within a phase the
        threads may be anywhere.
        """
        first, last = self._lifetimes()
        places = [0] * len(self.widths)
        live: list[tuple[int, int, int]] = []  # begin, end, last phase
        total = 0
        for buffer in sorted(range(self.num_outside, len(self.widths)), key=lambda b: first[b]):
            live = sorted(item for item in live if item[2] >= first[buffer])
            width = -(-self.widths[buffer] // CACHE_LINE) * CACHE_LINE
            begin = 0
            for taken, end, _ in live:
                if begin + width <= taken:
                    break
                begin = max(begin, end)
            places[buffer] = begin
            live.append((begin, begin + width, last[buffer]))
            total = max(total, begin + width)
        return places, total

    def _lifetimes(self) -> tuple[list[int], list[int]]:
        first, last = [0] * len(self.widths), [0] * len(self.widths)
        for phase, instruction in zip(self.phases, self.instructions, strict=True):
            for i, view in enumerate(instruction.views):
                if i < instruction.num_written and not first[view.buffer]:
                    first[view.buffer] = phase
                last[view.buffer] = phase
        return first, last


class Tracer:
    """Turns a record into a draft. Raises Untraceable."""

    def __init__(self, record: OpRecord, ids_T: torch.Tensor, positions_T: torch.Tensor) -> None:
        self._record = record
        self._num_tokens = len(ids_T)
        self._inputs = {_storage(ids_T): Input.IDS, _storage(positions_T): Input.POSITIONS}
        self._buffers: dict[int, int] = {}  # by storage
        # By the storages of the ids and of the weights.
        self._routes: dict[tuple[int, int], tuple[torch.Tensor, int, bool]] = {}
        self._draft = ProgramDraft()
        self._rules: dict[str, Callable[..., None]] = {
            "embedding": self._embedding,
            "rotary_rows": self._rotary_rows,
            "rms_norm": self._rms_norm,
            "add_rms_norm": self._add_rms_norm,
            "layer_norm": self._layer_norm,
            "rotary": self._rotary,
            "silu_mul": self._row_wise(Kind.SILU_MUL),
            "gelu_mul": self._row_wise(Kind.GELU_MUL),
            "gelu_tanh_mul": self._row_wise(Kind.GELU_TANH_MUL),
            "scale": self._scale,
            "gelu": self._row_wise(Kind.GELU),
            "gelu_tanh": self._row_wise(Kind.GELU_TANH),
            "relu": self._row_wise(Kind.RELU),
            "add": self._row_wise(Kind.ADD),
            "add_into": self._add_into,
            "beside": self._beside,
            "gated_add": self._row_wise(Kind.GATED_ADD),
            "moe_route": self._moe_route,
            "moe_experts": self._moe_experts,
            "linear": self._linear,
            "kv_write": self._kv_write,
            "attention": self._attention,
            "convolve": self._convolve,
            "delta_rule": self._delta_rule,
            "gated_norm": self._gated_norm,
            "sigmoid_mul": self._row_wise(Kind.SIGMOID_MUL),
        }

    def trace(self, result_TD: torch.Tensor, outside: Sequence[torch.Tensor] = ()) -> ProgramDraft:
        """Make the program that computes the result, which the record's last call returned.
        outside: other memory of the caller's that is read or written, whole rows [T, ...]."""
        for buffer, rows in enumerate((result_TD, *outside)):
            self._draft.widths.append(math.prod(rows.shape[1:]))
            self._buffers[_storage(rows)] = buffer
        self._draft.num_outside = 1 + len(outside)
        for call in self._record.calls:
            rule = self._rules.get(call.name)
            if rule is None:
                raise Untraceable(f"the operation {call.name} has no native form")
            rule(call.result, *call.args, **call.kwargs)
        return self._draft

    # --- operands ---

    def _view(self, tensor: torch.Tensor) -> View:
        buffer = self._buffers.get(_storage(tensor))
        if buffer is None:
            raise Untraceable("an operand is neither an input nor the result of an operation")
        width, shape = self._draft.widths[buffer], tensor.shape
        whole = len(shape) > 1 and shape[0] == self._num_tokens and tensor[0].is_contiguous()
        if not whole or tensor.stride(0) != width or tensor.storage_offset() >= width:
            raise Untraceable(f"a view of shape {list(shape)} is not made of columns")
        return View(buffer, int(tensor.storage_offset()))

    def _new(self, result: torch.Tensor) -> View:
        """Make the buffer of a result."""
        storage = _storage(result)
        if self._buffers.get(storage) != 0:
            if storage in self._buffers or storage in self._inputs:
                raise Untraceable("an operation returned one of its arguments")
            self._buffers[storage] = len(self._draft.widths)
            self._draft.widths.append(math.prod(result.shape[1:]))
        return self._view(result)

    def _emit(self, instruction: Instruction) -> None:
        self._draft.instructions.append(instruction)

    # --- one rule for each operation, with the operation's own arguments ---

    def _embedding(
        self,
        out: torch.Tensor,
        ids_T: torch.Tensor,
        weight_VD: torch.Tensor | PackedWeight,
        _: object = None,
    ) -> None:
        source = self._inputs.get(_storage(ids_T))
        if source is None:
            raise Untraceable("an embedding looks up something that is no input")
        views = (self._new(out),)
        if isinstance(weight_VD, PackedWeight):
            if source != Input.IDS:
                raise Untraceable("a packed table is looked up by positions")
            return self._emit(Instruction(Kind.PACKED_ROWS, views, packed=weight_VD))
        if weight_VD.dtype not in ELEMENTS:
            raise Untraceable(f"a table holds {weight_VD.dtype}")
        size = weight_VD.shape[1]
        self._emit(Instruction(Kind.EMBEDDING, views, size=size, input=source, table=weight_VD))

    def _rotary_rows(
        self,
        out: torch.Tensor,
        positions_T: torch.Tensor,
        frequencies_E: torch.Tensor,
        scale: float,
        _: object,
    ) -> None:
        if self._inputs.get(_storage(positions_T)) != Input.POSITIONS:
            raise Untraceable("rotary factors of something other than the positions")
        kind, views, size = Kind.ROTARY_FACTORS, (self._new(out),), 2 * len(frequencies_E)
        self._emit(Instruction(kind, views, size=size, frequencies=frequencies_E, scale=scale))

    def _rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        heads, size = math.prod(x.shape[1:-1]), x.shape[-1]
        weight = weight.float().expand(heads, size).contiguous()
        kind, views = Kind.RMS_NORM, (self._new(out), self._view(x))
        self._emit(Instruction(kind, views, heads=heads, size=size, weight=weight, eps=eps))

    def _add_rms_norm(
        self,
        out: tuple[torch.Tensor, torch.Tensor],
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
    ) -> None:
        sources = self._view(x), self._view(residual)
        kind, views = Kind.ADD_RMS_NORM, (self._new(out[0]), self._new(out[1]), *sources)
        size, weight = x.shape[-1], weight.float()
        self._emit(Instruction(kind, views, num_written=2, size=size, weight=weight, eps=eps))

    def _gated_norm(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight_E: torch.Tensor,
        eps: float,
    ) -> None:
        heads, size = math.prod(x.shape[1:-1]), x.shape[-1]
        kind, views = Kind.GATED_NORM, (self._new(out), self._view(x), self._view(gate))
        weight = weight_E.float()
        self._emit(Instruction(kind, views, heads=heads, size=size, weight=weight, eps=eps))

    def _layer_norm(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> None:
        weight, bias = _float(weight), _float(bias)
        kind, views, size = Kind.LAYER_NORM, (self._new(out), self._view(x)), x.shape[-1]
        self._emit(Instruction(kind, views, size=size, weight=weight, bias=bias, eps=eps))

    def _rotary(self, out: torch.Tensor, x_TNH: torch.Tensor, rows: torch.Tensor) -> None:
        views = self._new(out), self._view(x_TNH), self._view(rows)
        _, heads, size = x_TNH.shape
        self._emit(Instruction(Kind.ROTARY, views, heads=heads, size=size))

    def _row_wise(self, kind: Kind) -> Callable[..., None]:
        def rule(out: torch.Tensor, *operands: torch.Tensor) -> None:
            views = self._new(out), *map(self._view, operands)
            self._emit(Instruction(kind, views, size=math.prod(out.shape[1:])))

        return rule

    def _add_into(
        self, _out: None, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None
    ) -> None:
        if y is None:
            return self._copy(self._view(out), x)
        views = self._view(out), self._view(x), self._view(y)
        self._emit(Instruction(Kind.ADD, views, size=out.shape[1]))

    def _beside(self, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        place = self._new(out)
        self._copy(place, x)
        self._copy(replace(place, offset=place.offset + x.shape[1]), y)

    def _copy(self, place: View, x: torch.Tensor) -> None:
        views = place, self._view(x)
        self._emit(Instruction(Kind.SCALE, views, size=x.shape[1], scale=1.0))

    def _scale(self, out: torch.Tensor, x: torch.Tensor, factor: float) -> None:
        views, size = (self._new(out), self._view(x)), math.prod(out.shape[1:])
        self._emit(Instruction(Kind.SCALE, views, size=size, scale=factor))

    def _linear(
        self, out: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> None:
        if not isinstance(weight, PackedWeight | PackedParts):
            raise Untraceable("a weight is not packed for the core")
        view, own = self._view(x), self._new(out)
        operands = [self._operand(view, part) for part in weight.parts]
        first = 0
        for part, (operand, stride) in zip(weight.parts, operands, strict=True):
            place, end = replace(own, offset=own.offset + first), first + part.shape[0]
            own_bias = _float(None if bias is None else bias[first:end])
            views = place, operand
            self._emit(Instruction(Kind.MULTIPLY, views, stride=stride, bias=own_bias, packed=part))
            first = end

    def _operand(self, view: View, weight: PackedWeight) -> tuple[View, int]:
        """Return activations as the product reads them, and the bytes between their rows."""
        stride = operand_stride(weight)
        if stride == 0:
            return view, 4 * self._draft.widths[view.buffer]
        operand = View(len(self._draft.widths))
        self._draft.widths.append(stride // 4 + 2 * num_groups(weight))
        self._emit(Instruction(Kind.PREPARE, (operand, view), stride=stride, packed=weight))
        return operand, stride

    def _moe_route(
        self,
        out: tuple[torch.Tensor, torch.Tensor],
        logits_TE: torch.Tensor,
        num_chosen: int,
        normalises: bool,
    ) -> None:
        """Note it: the experts' own instruction begins with the route."""
        self._routes[_storage(out[0]), _storage(out[1])] = logits_TE, num_chosen, normalises

    def _moe_experts(
        self,
        out: torch.Tensor,
        x_TD: torch.Tensor,
        ids_TC: torch.Tensor,
        weights_TC: torch.Tensor,
        gate_up: Sequence[Weight],
        down: Sequence[Weight],
        biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
        clamped: ClampedGate | None = None,
    ) -> None:
        route = self._routes.get((_storage(ids_TC), _storage(weights_TC)))
        if route is None:
            raise Untraceable("experts or their weights are not chosen by moe_route alone")
        logits_TE, num_chosen, normalises = route
        of_gate_up, of_down = _all_packed(gate_up), _all_packed(down)
        first, second = biases or ((), ())
        floats = [each.float() for each in first], [each.float() for each in second]
        experts = Experts(of_gate_up, of_down, floats, num_chosen, normalises, clamped)
        views = self._new(out), self._view(x_TD), self._view(logits_TE)
        self._emit(Instruction(Kind.EXPERTS, views, layer=len(self._draft.experts)))
        self._draft.experts.append(experts)

    def _kv_write(
        self, _out: None, _backend: object, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        views = self._view(k), self._view(v)
        self._emit(Instruction(Kind.STORE, views, num_written=0, layer=layer))

    def _attention(
        self,
        out: torch.Tensor,
        _backend: object,
        layer: int,
        q: torch.Tensor,
        scale: float,
        *,
        soft_cap: float | None = None,
        sinks_N: torch.Tensor | None = None,
    ) -> None:
        self._emit(
            Instruction(
                Kind.ATTEND,
                (self._new(out), self._view(q)),
                heads=q.shape[1],
                layer=layer,
                scale=scale,
                soft_cap=soft_cap or 0.0,
                weight=_float(sinks_N),
            )
        )

    def _convolve(
        self,
        out: torch.Tensor,
        _backend: object,
        layer: int,
        x_TC: torch.Tensor,
        weight_CW: torch.Tensor,
    ) -> None:
        kind, views = Kind.CONVOLVE, (self._new(out), self._view(x_TC))
        weight, (size, width) = weight_CW.T.float().contiguous(), weight_CW.shape
        self._emit(Instruction(kind, views, heads=width, size=size, layer=layer, weight=weight))

    def _delta_rule(
        self,
        out: torch.Tensor,
        _backend: object,
        layer: int,
        qkv_TC: torch.Tensor,
        gates_TG: torch.Tensor,
        rate_N: torch.Tensor,
        shift_N: torch.Tensor,
        heads: DeltaHeads,
    ) -> None:
        views = self._new(out), self._view(qkv_TC), self._view(gates_TG)
        rate, shift = rate_N.float(), shift_N.float()
        self._emit(
            Instruction(Kind.DELTA_RULE, views, layer=layer, weight=rate, bias=shift, delta=heads)
        )


def _float(values: torch.Tensor | None) -> torch.Tensor | None:
    return None if values is None else values.float()


def operand_stride(weight: PackedWeight) -> int:
    """Count the bytes between rows of a product's prepared activations; 0 if none are prepared."""
    num_bytes = needed_core().linear_operand_bytes(weight.core)
    return -(-num_bytes // 64) * 64


def num_groups(weight: PackedWeight) -> int:
    """Count the scales of one row of a product's int8 activations; 0 if they are not int8."""
    layout = weight.layout
    return -(-layout.inputs // layout.group) if rounds_activations(weight.format) else 0


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
