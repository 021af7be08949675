"""The feed-forward layer of a mixture of experts: a router and its experts.

Shape legend: T tokens, E experts, C experts of a token, D model dim, F feed-forward dim of an
expert, G = 2 F.

A GPU multiplies the weights of all experts at once, so one tensor holds them. On other devices each
expert has its own linear layers, packed, quantised and planned like all others. Experts of a
quantised checkpoint have their own layers on a GPU too, until they are loaded.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from quire.models.checkpoint.sources import Part, Rows, Source, Stretches, rows_of
from quire.models.parts.layers import (
    Layer,
    Linear,
    ParamFactory,
    is_added_elsewhere,
)
from quire.ops.adapters import AdapterSlots, ExpertAdapters
from quire.ops.collective import all_reduce
from quire.ops.elementwise import ClampedGate
from quire.ops.gpu import is_gpu
from quire.ops.moe import moe_experts, moe_route, moe_route_groups
from quire.ops.weights.device_weights import Weight, pack_experts, stacked_weights
from quire.ops.weights.formats import Quantization
from quire.spec.cuts import Cut
from quire.spec.model_options import ExpertOptions
from quire.spec.model_spec import ModelSpec


@dataclass(frozen=True)
class TensorOfAll:
    """A checkpoint tensor that holds all experts of a layer."""

    name: str
    experts: Cut  # experts of this rank
    is_turned: bool  # whether the shape is [E, K, N] instead of [E, N, K]
    rows: Rows  # rows N of each expert
    columns: Cut | None = None  # this rank's part of the columns K; None for all
    is_either_way: bool = False  # whether `is_turned` depends on the shape in the checkpoint

    def sources(
        self, weight: torch.Tensor, bias: torch.Tensor | None, expert: int | None = None
    ) -> list[Source]:
        """List the sources of weight and bias. expert: index of one expert ([N, K] and [N]); None
        for all experts of this rank ([E, N, K] and [E, N])."""
        rows, order = self.rows.taken()
        dimension = 1 if expert is None else 0
        of_rows: dict[str, Any] = {"rows": rows, "order": order, "order_dimension": dimension}
        own = of_rows | {"columns": self.columns, "is_either_way": self.is_either_way}
        found = [Source(self.name, weight, self.is_turned, **own)]
        if bias is not None:
            own = of_rows | {"is_elsewhere": is_added_elsewhere(self.columns)}
            found.append(Source(f"{self.name}_bias", bias, **own))
        if expert is None and self.experts.is_whole:
            return found
        return [self._part(each, expert) for each in found]

    def is_among(self, stored: Container[str]) -> bool:
        """Return whether the weight files hold this tensor, plain or in MXFP4."""
        return self.name in stored or f"{self.name}_blocks" in stored

    def _part(self, source: Source, expert: int | None) -> Source:
        """Restrict a source to one expert of the tensor, or to all experts of this rank."""
        own, shape = self.experts, source.stored_shape
        if expert is None:
            return replace(source, part=Part(0, own.first, own.count, (own.whole, *shape[1:])))
        return replace(source, part=Part(0, expert, 1, (own.whole, *shape)))


@dataclass(frozen=True)
class ExpertForm:
    """The structure of an architecture's experts, and their names in checkpoints."""

    router: str = "gate"  # module of the router
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # modules of an expert
    stand_alone: bool = True  # whether files of unknown layout hold `parts`, not `together`
    together: tuple[str, str] = ("gate_up_proj", "down_proj")  # tensors that hold all experts
    is_turned: bool = False  # whether `together` has inputs before outputs
    is_either_way: bool = False  # whether `is_turned` depends on the shape in the checkpoint
    takes_turns: bool = False  # whether rows of gate and up alternate
    has_bias: bool = False  # whether router and experts have biases
    clamped: ClampedGate | None = None  # the gate, if it is not SiLU

    def tensors_of_all(
        self, name: str, size: int, experts: Cut, inner: Cut
    ) -> tuple[TensorOfAll, TensorOfAll]:
        """Describe the tensors of all experts: gate and up, in this order, and down. experts:
        experts of this rank. inner: its part of their inner dimension."""
        order = None
        if self.takes_turns:
            order = torch.arange(2 * inner.whole).view(-1, 2).t().flatten()
        gate_up, down = (f"{name}.{each}" for each in self.together)
        rest = experts, self.is_turned
        columns = None if inner.is_whole else inner
        first = TensorOfAll(gate_up, *rest, rows_of([inner, inner], order))
        last = TensorOfAll(down, *rest, rows_of(size), columns)
        if self.is_either_way:
            return replace(first, is_either_way=True), replace(last, is_either_way=True)
        return first, last

    def modules_of(self, name: str) -> tuple[list[str], list[str]]:
        """List the modules of one expert: gate and up, and down."""
        modules = [f"{name}.{part}" for part in self.parts]
        return modules[:2], modules[2:]


USUAL = ExpertForm()


class Router(Linear):
    """The logits of the experts. The router is never quantised, because a small error sends a token
    to another expert."""

    keeps_dtype = True

    def __init__(
        self, name: str, size: int, num_experts: int, factory: ParamFactory, bias: bool = False
    ) -> None:
        super().__init__([name], size, [num_experts], factory, bias=bias)


class RouteBias(Layer):
    """A bias per expert that is added to its score for the choice of experts (DeepSeek-V3)."""

    neutral = MappingProxyType({"weight": 0.0})

    def __init__(self, router: str, num_experts: int, factory: ParamFactory) -> None:
        super().__init__()
        self._name = f"{router}.e_score_correction_bias"
        self.weight = factory.exact_parameter(num_experts)

    def sources(self) -> list[Source]:
        return [Source(self._name, self.weight)]


class ExpertLinear(Linear):
    """A linear layer of one expert, filled by its own modules or by a slice of a joint tensor.

    is_part: whether a slice fills it. is_usually_part: the default for files of unknown layout.
    """

    def __init__(
        self,
        names: Sequence[str],
        sizes: tuple[int | Cut, int | Cut],
        factory: ParamFactory,
        of_all: TensorOfAll,
        expert: int,
        form: ExpertForm,
    ) -> None:
        inputs, outputs = sizes
        super().__init__(names, inputs, [outputs] * len(names), factory, bias=form.has_bias)
        self.of_all, self._expert = of_all, expert
        self.is_usually_part = self.is_part = not form.stand_alone

    def sources(self) -> list[Source]:
        if self.is_part:
            return self.of_all.sources(self.weight, self.bias, self._expert)
        return super().sources()


class ExpertList(nn.Module):
    """Experts with linear layers of their own."""

    def __init__(
        self, name: str, size: int, options: ExpertOptions, factory: ParamFactory, form: ExpertForm
    ) -> None:
        super().__init__()
        self._made_of = name, size, options
        self.form, self._factory, self.num_chosen = form, factory, options.num_chosen
        inner = factory.place.inner_size(options.inner_size)
        self._own = own = factory.place.experts(options.num_experts)
        of_all = form.tensors_of_all(name, size, own, inner)
        modules = [form.modules_of(each) for each in _expert_names(name, own)]
        self.elsewhere = names_elsewhere(name, own)
        shapes: list[tuple[int | Cut, int | Cut]] = [(size, inner), (inner, size)]
        self.gate_up, self.down = (
            nn.ModuleList(
                ExpertLinear(names[i], sizes, factory, of_all[i], expert, form)
                for expert, names in enumerate(modules, own.first)
            )
            for i, sizes in enumerate(shapes)
        )

    def adopt(self, stored: Container[str]) -> None:
        """Detect whether the weight files hold modules per expert or joint tensors."""
        for layer in (*linears(self.gate_up), *linears(self.down)):
            layer.is_part = layer.of_all.is_among(stored)

    def forward(
        self, x_TD: torch.Tensor, ids_TC: torch.Tensor, weights_TC: torch.Tensor
    ) -> torch.Tensor:
        gate_up, down = linears(self.gate_up), linears(self.down)
        weights = [layer.weight for layer in gate_up], [layer.weight for layer in down]
        biases = (_biases(gate_up), _biases(down)) if self.form.has_bias else None
        clamped, first = self.form.clamped, first_of(self._own)
        routed, adapted = (x_TD, ids_TC, weights_TC), _adapted(gate_up[0], down[0])
        return moe_experts(*routed, *weights, biases, clamped, first, adapted)

    def stacked(self) -> "StackedExperts":
        """Return the loaded weights as StackedExperts. This list drops gate_up and down as each is
        stacked, so that both never exist twice at the same time."""
        empty = replace(self._factory, device=torch.device("meta"))
        stack = StackedExperts(*self._made_of, empty, self.form)
        for name in ("gate_up", "down"):
            layers = linears(getattr(self, name))
            if self.form.has_bias:
                biases = torch.stack(_biases(layers))
                setattr(stack, f"{name}_bias", nn.Parameter(biases, requires_grad=False))
            stack.set(name, stacked_weights([layer.weight for layer in layers]))
            setattr(self, name, nn.ModuleList())
        return stack


class StackedExperts(Layer):
    """Experts in joint weights: gate and up [E, 2 F, D], gate first, and down [E, D, F]."""

    def __init__(
        self, name: str, size: int, options: ExpertOptions, factory: ParamFactory, form: ExpertForm
    ) -> None:
        super().__init__()
        part = factory.place.inner_size(options.inner_size)
        self._own = own = factory.place.experts(options.num_experts)
        self._part, self._form, inner, count = part, form, part.count, own.count
        self._numbers = {each: i for i, each in enumerate(_expert_names(name, own))}
        self._of_all = form.tensors_of_all(name, size, own, part)
        self.elsewhere = names_elsewhere(name, own)
        self.are_parts = not form.stand_alone
        self.gate_up = factory.parameter(count, 2 * inner, size)
        self.down = factory.parameter(count, size, inner)
        self.gate_up_bias = factory.parameter(count, 2 * inner) if form.has_bias else None
        self.down_bias = factory.parameter(count, size) if form.has_bias else None

    def adopt(self, stored: Container[str]) -> None:
        """See ExpertList."""
        self.are_parts = self._of_all[0].is_among(stored)

    def forward(
        self, x_TD: torch.Tensor, ids_TC: torch.Tensor, weights_TC: torch.Tensor
    ) -> torch.Tensor:
        biases = None
        if self.gate_up_bias is not None and self.down_bias is not None:
            biases = self.gate_up_bias, self.down_bias
        weights, clamped = (self.gate_up, self.down), self._form.clamped
        first = first_of(self._own)
        return moe_experts(x_TD, ids_TC, weights_TC, *weights, biases, clamped, first)

    def pack(self, quantization: Quantization | None) -> None:
        """Quantise the loaded weights, which then become plain attributes."""
        for name in ("gate_up", "down"):
            self.set(name, pack_experts(getattr(self, name), quantization))

    def set(self, name: str, weight: Weight) -> None:
        """Replace a weight."""
        if weight is not getattr(self, name):
            delattr(self, name)
            if isinstance(weight, torch.Tensor):
                weight = nn.Parameter(weight, requires_grad=False)
                self.register_parameter(name, weight)
            else:
                vars(self)[name] = weight

    def sources(self) -> list[Source]:
        if self.are_parts:
            gate_up, down = self._of_all
            first = gate_up.sources(self.gate_up, self.gate_up_bias)
            return [*first, *down.sources(self.down, self.down_bias)]
        parts = [f"{name}.{part}" for name in self._numbers for part in self._form.parts]
        kinds = ("weight", "bias") if self._form.has_bias else ("weight",)
        return [self.source(f"{part}.{kind}") for part in parts for kind in kinds]

    def stretches(self, name: str) -> Stretches:
        """See Layer."""
        gate_up, down = (all_of.rows.cuts * len(self._numbers) for all_of in self._of_all)
        if name == "down_bias":
            return Stretches(down)
        columns = None if self._part.is_whole else self._part
        return Stretches(down, columns) if name == "down" else Stretches(gate_up)

    def source(self, name: str) -> Source:
        """Return the source with this name, without building the sources of all experts."""
        if self.are_parts:
            return super().source(name)
        expert, part, kind = name.rsplit(".", 2)
        number, (gate, _, down) = self._numbers[expert], self._form.parts
        own, rows = (self.gate_up, self.down), None if self._part.is_whole else self._part
        if kind == "bias":
            assert self.gate_up_bias is not None and self.down_bias is not None
            own = self.gate_up_bias, self.down_bias
        if part == down and kind == "bias":
            return Source(name, own[1][number], is_elsewhere=is_added_elsewhere(rows))
        if part == down:
            return Source(name, own[1][number], columns=rows)
        first, second = own[0][number].split(self._part.count)
        return Source(name, first if part == gate else second, rows=rows)


class SparseMLP(nn.Module):
    """A mixture of experts: routes each token to some experts and sums their weighted outputs.

    on_logits: receives the router's logits [T, E] and returns the logits to choose by.
    """

    on_logits: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        options: ExpertOptions,
        factory: ParamFactory,
        form: ExpertForm = USUAL,
    ) -> None:
        super().__init__()
        self.options, size, count = options, spec.hidden_size, options.num_experts
        router = f"{name}.{form.router}"
        self.router = Router(router, size, count, factory, bias=form.has_bias)
        self.route_bias = None
        if options.routing is not None and options.routing.is_sigmoid:
            self.route_bias = RouteBias(router, count, factory)
        kind = experts_class(factory.device)
        if spec.quantization is not None:
            kind = ExpertList
        self.experts = kind(f"{name}.experts", size, options, factory, form)
        place = factory.place
        parts = place.experts(count), place.inner_size(options.inner_size)
        self._group = None if all(part.is_whole for part in parts) else place.tensor

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        logits_TE = self.router(x_TD)
        if self.on_logits is not None:
            logits_TE = self.on_logits(logits_TE)
        ids_TC, weights_TC = self._route(logits_TE)
        out_TD: torch.Tensor = self.experts(x_TD, ids_TC, weights_TC)
        return out_TD if self._group is None else all_reduce(out_TD, self._group)

    def _route(self, logits_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's experts and their weights, [T, C]."""
        options, bias = self.options, self.route_bias
        chosen = options.num_chosen, options.normalises
        if options.routing is None:
            return moe_route(logits_TE, *chosen)
        bias_E = None if bias is None else bias.weight
        return moe_route_groups(logits_TE, *chosen, options.routing, bias_E)

    def finish(self, device: torch.device) -> None:
        """Convert the loaded experts to the form that the device multiplies."""
        if not isinstance(self.experts, experts_class(device)):
            assert isinstance(self.experts, ExpertList)
            self.experts = self.experts.stacked()


def first_of(own: Cut) -> int | None:
    """Return the index of a rank's first expert; None if it holds all experts."""
    return None if own.is_whole else own.first


def experts_class(device: torch.device) -> type[ExpertList] | type[StackedExperts]:
    """Return the class of experts that a device multiplies."""
    return StackedExperts if is_gpu(device) else ExpertList


def linears(layers: nn.ModuleList) -> list[ExpertLinear]:
    """Return the layers of a list of experts."""
    return cast(list[ExpertLinear], list(layers))


def _adapted(gate_up: ExpertLinear, down: ExpertLinear) -> ExpertAdapters | None:
    """Return where adapters change experts, from the first one's layers."""
    if gate_up.adapted is None or down.adapted is None:
        return None
    slots, number = gate_up.adapted
    assert isinstance(slots, AdapterSlots), "a GPU's slots have no layers of experts"
    return ExpertAdapters(slots, (number, down.adapted[1]))


def _biases(layers: list[ExpertLinear]) -> list[torch.Tensor]:
    return [cast(torch.Tensor, layer.bias) for layer in layers]


def names_elsewhere(name: str, own: Cut) -> tuple[str, ...]:
    """List prefixes of the names of tensors whose experts belong to other ranks."""
    others = (*range(own.first), *range(own.first + own.count, own.whole))
    return tuple(f"{name}.{expert}." for expert in others)


def _expert_names(name: str, experts: Cut) -> list[str]:
    return [f"{name}.{experts.first + i}" for i in range(experts.count)]
