"""Translation of a record of operations to a program (`ops/trace/program.py`): one rule per
operation.

Shape legend: T tokens of the step, N heads, H head dim, V rows of a table.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.ops.adapters import AdapterSlots, ExpertAdapters
from quire.ops.attention_inputs import DeltaHeads, Scores
from quire.ops.collective import RankGroup
from quire.ops.collectives.shared_group import SharedGroup
from quire.ops.elementwise import QUICK_GELU, ClampedGate
from quire.ops.host.native import needed_core
from quire.ops.latent import HeadWeights
from quire.ops.registry import OpRecord
from quire.ops.trace.program import (
    Experts,
    Input,
    Instruction,
    Kind,
    ProgramDraft,
    Route,
    Untraceable,
    View,
)
from quire.ops.weights.device_weights import Weight
from quire.ops.weights.formats import rounds_activations
from quire.ops.weights.packed import ELEMENTS, PackedParts, PackedWeight


class Tracer:
    """Translator of one record to a draft of a program. Raises Untraceable."""

    def __init__(self, record: OpRecord, ids_T: torch.Tensor, positions_T: torch.Tensor) -> None:
        self._record = record
        self._num_tokens = len(ids_T)
        self._inputs = {_storage(ids_T): Input.IDS, _storage(positions_T): Input.POSITIONS}
        self._buffers: dict[int, int] = {}  # buffer of each storage
        # Arguments of moe_route, by the storages of its results: ids and weights.
        self._routes: dict[tuple[int, int], Route] = {}
        self._draft = ProgramDraft()
        self._rules: dict[str, Callable[..., None]] = {
            "all_reduce": self._all_reduce,
            "embedding": self._embedding,
            "part_of_embedding": self._part_of_embedding,
            "plain_ids": self._input(Input.IDS),
            "segment_ids": self._input(Input.SEGMENTS),
            "rotary_rows": self._rotary_rows,
            "rms_norm": self._rms_norm,
            "add_rms_norm": self._add_rms_norm,
            "square_sums": self._square_sums,
            "rms_norm_by_sum": self._rms_norm_by_sum,
            "layer_norm": self._layer_norm,
            "rotary": self._rotary,
            "silu_mul": self._row_wise(Kind.SILU_MUL),
            "gelu_mul": self._row_wise(Kind.GELU_MUL),
            "gelu_tanh_mul": self._row_wise(Kind.GELU_TANH_MUL),
            "scale": self._scale,
            "gelu": self._row_wise(Kind.GELU),
            "gelu_tanh": self._row_wise(Kind.GELU_TANH),
            "quick_gelu": self._quick_gelu,
            "relu": self._row_wise(Kind.RELU),
            "add": self._row_wise(Kind.ADD),
            "add_adapters": self._add_adapters,
            "add_into": self._add_into,
            "concatenate": self._concatenate,
            "gated_add": self._row_wise(Kind.GATED_ADD),
            "moe_route": self._moe_route,
            "moe_route_groups": self._moe_route,
            "moe_experts": self._moe_experts,
            "linear": self._linear,
            "latent_queries": self._latent_queries,
            "latent_values": self._latent_values,
            "kv_write": self._kv_write,
            "attention": self._attention,
            "latent_write": self._latent_write,
            "latent_attention": self._latent_attention,
            "convolve": self._convolve,
            "delta_rule": self._delta_rule,
            "gated_norm": self._gated_norm,
            "sigmoid_mul": self._row_wise(Kind.SIGMOID_MUL),
            "place": self._place,
            "add_features": self._add_features,
            "scale_by_position": self._scale_by_position,
            "scale_by_top": self._scale_by_top,
        }

    def trace(self, result_TD: torch.Tensor, outside: Sequence[torch.Tensor] = ()) -> ProgramDraft:
        """Make the program that computes the result, which the record's last call returned.
        outside: whole rows [T, ...] of other memory of the caller that it reads or writes."""
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
        """Return the view of a tensor as columns of a buffer."""
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

    # --- one rule for each operation: takes the operation's result and arguments ---

    def _all_reduce(self, out: torch.Tensor, x: torch.Tensor, group: RankGroup) -> None:
        if not isinstance(group, SharedGroup):
            raise Untraceable("its ranks do not share memory")
        view = self._view(x)
        if math.prod(x.shape[1:]) != self._draft.widths[view.buffer]:
            raise Untraceable("ranks sum a part of an operation's result")
        assert _storage(out) == _storage(x), "ranks that share memory sum in place"
        self._emit(Instruction(Kind.ALL_REDUCE, (view, view), group=group))

    def _input(self, found: Input) -> Callable[..., None]:
        """Make the rule of an operation whose result the core computes from the ids itself."""

        def rule(out: torch.Tensor, ids_T: torch.Tensor) -> None:
            if self._inputs.get(_storage(ids_T)) != Input.IDS:
                raise Untraceable("ids that are not an input are split")
            self._inputs[_storage(out)] = found

        return rule

    def _embedding(
        self,
        out: torch.Tensor,
        ids_T: torch.Tensor,
        weight_VD: torch.Tensor | PackedWeight,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._part_of_embedding(out, ids_T, weight_VD, 0, dtype)

    def _part_of_embedding(
        self,
        out: torch.Tensor,
        ids_T: torch.Tensor,
        weight_VD: torch.Tensor | PackedWeight,
        first: int,
        _: object = None,
    ) -> None:
        source = self._inputs.get(_storage(ids_T))
        if source is None:
            raise Untraceable("an embedding looks up something that is not an input")
        kind, views = Kind.EMBEDDING, (self._new(out),)
        count, size = weight_VD.shape
        if isinstance(weight_VD, PackedWeight):
            if source != Input.IDS:
                raise Untraceable("a packed table is looked up by something else than ids")
            kind = Kind.PACKED_ROWS
            return self._emit(Instruction(kind, views, first=first, count=count, packed=weight_VD))
        if weight_VD.dtype not in ELEMENTS:
            raise Untraceable(f"a table holds {weight_VD.dtype}")
        self._emit(
            Instruction(
                kind, views, size=size, first=first, count=count, input=source, table=weight_VD
            )
        )

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
        frequencies_AE = torch.atleast_2d(frequencies_E).contiguous()
        num_axes, half = frequencies_AE.shape
        self._emit(
            Instruction(
                Kind.ROTARY_FACTORS,
                (self._new(out),),
                size=2 * half,
                count=num_axes,
                frequencies=frequencies_AE,
                scale=scale,
            )
        )

    def _place(
        self, out: torch.Tensor, x: torch.Tensor, ids_T: torch.Tensor, memory_SW: torch.Tensor
    ) -> None:
        self._encoded(Kind.PLACE, out, x, ids_T, memory_SW, 0)

    def _add_features(self, out: torch.Tensor, *arguments: Any) -> None:
        self._encoded(Kind.ADD_FEATURES, out, *arguments)

    def _encoded(
        self,
        kind: Kind,
        out: torch.Tensor,
        x: torch.Tensor,
        ids_T: torch.Tensor,
        memory_SW: torch.Tensor,
        offset: int,
    ) -> None:
        if self._inputs.get(_storage(ids_T)) != Input.IDS:
            raise Untraceable("encoder outputs are chosen by something other than the ids")
        if memory_SW.dtype != torch.float32:
            raise Untraceable(f"the encoder memory holds {memory_SW.dtype}")
        views, size, count = (self._new(out), self._view(x)), x.shape[1], memory_SW.shape[1]
        self._emit(Instruction(kind, views, size=size, first=offset, count=count, table=memory_SW))

    def _rms_norm(
        self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        heads, size = math.prod(x.shape[1:-1]), x.shape[-1]
        weight = weight.float().expand(heads, size).contiguous()
        kind, views = Kind.RMS_NORM, (self._new(out), self._view(x))
        self._emit(Instruction(kind, views, heads=heads, size=size, weight=weight, eps=eps))

    def _square_sums(self, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        view_of_out = self._new(out)
        for i, each in enumerate((x, y)):
            views = replace(view_of_out, offset=view_of_out.offset + i), self._view(each)
            self._emit(Instruction(Kind.SQUARE_SUM, views, size=each.shape[1]))

    def _rms_norm_by_sum(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        sums_T2: torch.Tensor,
        index: int,
        count: int,
        eps: float,
    ) -> None:
        sums, size, weight = self._view(sums_T2), x.shape[1], weight.float()
        views = self._new(out), self._view(x), replace(sums, offset=sums.offset + index)
        kind, scale = Kind.RMS_NORM_BY_SUM, 1 / count
        self._emit(Instruction(kind, views, size=size, weight=weight, eps=eps, scale=scale))

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

    def _add_adapters(
        self, _out: None, out: torch.Tensor, x: torch.Tensor, slots: AdapterSlots, layer: int
    ) -> None:
        views, self._draft.adapters = (self._view(out), self._view(x)), slots
        self._emit(Instruction(Kind.ADAPT, views, layer=layer))

    def _concatenate(self, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        view_of_out = self._new(out)
        self._copy(view_of_out, x)
        self._copy(replace(view_of_out, offset=view_of_out.offset + x.shape[1]), y)

    def _copy(self, view_of_out: View, x: torch.Tensor) -> None:
        views = view_of_out, self._view(x)
        self._emit(Instruction(Kind.SCALE, views, size=x.shape[1], scale=1.0))

    def _scale(self, out: torch.Tensor, x: torch.Tensor, factor: float) -> None:
        views, size = (self._new(out), self._view(x)), math.prod(out.shape[1:])
        self._emit(Instruction(Kind.SCALE, views, size=size, scale=factor))

    def _scale_by_position(
        self,
        out: torch.Tensor,
        x_TM: torch.Tensor,
        positions_T: torch.Tensor,
        period: int,
        factor: float,
    ) -> None:
        if self._inputs.get(_storage(positions_T)) != Input.POSITIONS:
            raise Untraceable("a scale by something other than the positions")
        kind, views = Kind.SCALE_BY_POSITION, (self._new(out), self._view(x_TM))
        size = math.prod(out.shape[1:])
        self._emit(Instruction(kind, views, size=size, count=period, scale=factor))

    def _scale_by_top(self, out: torch.Tensor, x_TD: torch.Tensor, logits_TE: torch.Tensor) -> None:
        kind, views = Kind.SCALE_BY_TOP, (self._new(out), self._view(x_TD), self._view(logits_TE))
        self._emit(Instruction(kind, views, size=x_TD.shape[1], count=logits_TE.shape[1]))

    def _quick_gelu(self, out: torch.Tensor, x: torch.Tensor) -> None:
        size, gate = math.prod(out.shape[1:]), View(len(self._draft.widths))
        self._draft.widths.append(size)
        self._emit(Instruction(Kind.SCALE, (gate, self._view(x)), size=size, scale=QUICK_GELU))
        views = self._new(out), self._view(x), gate
        self._emit(Instruction(Kind.SIGMOID_MUL, views, size=size))

    def _linear(
        self, out: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
    ) -> None:
        if not isinstance(weight, PackedWeight | PackedParts):
            raise Untraceable("a weight is not packed for the core")
        view, own = self._view(x), self._new(out)
        operands = [self._operand(view, part) for part in weight.parts]
        first = 0
        for part, (operand, stride) in zip(weight.parts, operands, strict=True):
            view_of_out, end = replace(own, offset=own.offset + first), first + part.shape[0]
            own_bias = _float(None if bias is None else bias[first:end])
            views = view_of_out, operand
            self._emit(Instruction(Kind.MULTIPLY, views, stride=stride, bias=own_bias, packed=part))
            first = end

    def _operand(self, view: View, weight: PackedWeight) -> tuple[View, int]:
        """Return the activations that the product reads, and the bytes between their rows."""
        stride = operand_stride(weight)
        if stride == 0:
            return view, 4 * self._draft.widths[view.buffer]
        operand = View(len(self._draft.widths))
        self._draft.widths.append(stride // 4 + 2 * num_groups(weight))
        self._emit(Instruction(Kind.PREPARE, (operand, view), stride=stride, packed=weight))
        return operand, stride

    def _latent_queries(
        self,
        out: torch.Tensor,
        q_TNP: torch.Tensor,
        rotated_TNE: torch.Tensor,
        weights: HeadWeights,
    ) -> None:
        view_of_out, (_, heads, width) = self._new(out), out.shape
        self._by_head(view_of_out, width, q_TNP, weights)
        size = rotated_TNE.shape[2]
        after = replace(view_of_out, offset=view_of_out.offset + width - size)
        kind, views = Kind.COPY_HEADS, (after, self._view(rotated_TNE))
        self._emit(Instruction(kind, views, heads=heads, size=size, count=width))

    def _latent_values(
        self, out: torch.Tensor, read_TNR: torch.Tensor, weights: HeadWeights
    ) -> None:
        self._by_head(self._new(out), out.shape[2], read_TNR, weights)

    def _by_head(
        self, view_of_out: View, width: int, x: torch.Tensor, weights: HeadWeights
    ) -> None:
        """Multiply each head of x [T, N, I] with its weight. width: numbers of a head of `out`."""
        if isinstance(weights, torch.Tensor):
            raise Untraceable("the weights of heads are not packed for the core")
        kind, view = Kind.HEAD_PRODUCT, self._view(x)
        for head, weight in enumerate(_all_packed(weights)):
            views = (
                replace(view_of_out, offset=view_of_out.offset + head * width),
                replace(view, offset=view.offset + head * x.shape[2]),
            )
            self._emit(Instruction(kind, views, packed=weight, joins=head > 0))

    def _moe_route(
        self,
        out: tuple[torch.Tensor, torch.Tensor],
        *route: Any,
    ) -> None:
        """Record the route; the experts' instruction begins with it."""
        self._routes[_storage(out[0]), _storage(out[1])] = Route(*route)

    def _moe_experts(
        self,
        out: torch.Tensor,
        x_TD: torch.Tensor,
        ids_TC: torch.Tensor,
        weights_TC: torch.Tensor,
        *experts: Any,
        **named: Any,
    ) -> None:
        route = self._routes.get((_storage(ids_TC), _storage(weights_TC)))
        if route is None:
            raise Untraceable("experts or their weights are not chosen by moe_route alone")
        views = self._new(out), self._view(x_TD), self._view(route.logits_TE)
        self._emit(Instruction(Kind.EXPERTS, views, layer=len(self._draft.experts)))
        made = _experts(route, *experts, **named)
        self._draft.experts.append(made)
        if made.adapted is not None:
            self._draft.adapters = made.adapted.slots

    def _kv_write(
        self, _out: None, _backend: object, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        views = self._view(k), self._view(v)
        self._emit(Instruction(Kind.STORE, views, num_written=0, layer=layer))

    def _latent_write(
        self, _out: None, _backend: object, layer: int, latent_TL: torch.Tensor
    ) -> None:
        self._kv_write(None, None, layer, latent_TL, latent_TL)

    def _latent_attention(
        self,
        out: torch.Tensor,
        backend: object,
        layer: int,
        q: torch.Tensor,
        scores: Scores,
        num_values: int,
    ) -> None:
        self._attention(out, backend, layer, q, scores, num_values)

    def _attention(
        self,
        out: torch.Tensor,
        _backend: object,
        layer: int,
        q: torch.Tensor,
        scores: Scores,
        num_values: int = 0,
    ) -> None:
        self._emit(
            Instruction(
                Kind.ATTEND,
                (self._new(out), self._view(q)),
                heads=q.shape[1],
                size=num_values,
                layer=layer,
                scale=scores.scale,
                soft_cap=scores.soft_cap or 0.0,
                weight=_float(scores.sinks_N),
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
    """Return the bytes between rows of a product's prepared activations; 0 if none are prepared."""
    num_bytes = needed_core().linear_operand_bytes(weight.core)
    return -(-num_bytes // 64) * 64


def num_groups(weight: PackedWeight) -> int:
    """Return the number of scales of a row of int8 activations; 0 if they are not int8."""
    layout = weight.layout
    return -(-layout.inputs // layout.group) if rounds_activations(weight.format) else 0


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage, which identifies it."""
    return tensor.untyped_storage().data_ptr()


def _experts(
    route: Route,
    gate_up: Sequence[Weight],
    down: Sequence[Weight],
    biases: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | None = None,
    clamped: ClampedGate | None = None,
    first: int | None = None,
    adapted: ExpertAdapters | None = None,
) -> Experts:
    """Describe the experts of a layer by their route and the other arguments of moe_experts."""
    of_up, of_sums = biases or ((), ())
    floats = [each.float() for each in of_up], [each.float() for each in of_sums]
    weights, view_of_out = (
        (_all_packed(gate_up), _all_packed(down)),
        (first or 0, route.logits_TE.shape[1]),
    )
    return Experts(*weights, floats, *view_of_out, route, clamped, adapted)


def _all_packed(weights: Sequence[Weight]) -> list[PackedWeight]:
    packed = [each for each in weights if isinstance(each, PackedWeight)]
    if len(packed) < len(weights):
        raise Untraceable("the weights of experts or of heads are not packed for the core")
    return packed
