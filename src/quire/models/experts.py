"""The feed-forward layer of a mixture of experts: a router and its experts.

Shape legend: T tokens, E experts, C experts of a token, D model dim, F feed-forward dim of an
expert, G = 2 F.

A GPU multiplies the weights of all experts at once, so they stand in one tensor there. Elsewhere
each expert has linear layers of its own, which are packed, quantised and planned like all others.
"""

from typing import cast

import torch
from torch import nn

from quire.base.model_options import ExpertOptions
from quire.models.layers import Layer, Linear, ParamFactory, Source
from quire.ops.formats import Quantization
from quire.ops.linear import Weight, pack_experts
from quire.ops.moe import moe_experts, moe_route


class Router(Linear):
    """Logits of the experts. Never quantised: it is small, and a small error sends a token to
    another expert."""

    keeps_dtype = True

    def __init__(self, name: str, size: int, num_experts: int, factory: ParamFactory) -> None:
        super().__init__([name], size, [num_experts], factory)


class ExpertList(nn.Module):
    """Experts with linear layers of their own."""

    def __init__(self, name: str, size: int, options: ExpertOptions, factory: ParamFactory) -> None:
        super().__init__()
        inner, names = options.inner_size, _expert_names(name, options)
        self.num_chosen = options.num_chosen
        self.gate_up = nn.ModuleList(
            Linear([f"{each}.gate_proj", f"{each}.up_proj"], size, [inner, inner], factory)
            for each in names
        )
        self.down = nn.ModuleList(
            Linear([f"{each}.down_proj"], inner, [size], factory) for each in names
        )

    def forward(
        self, x_TD: torch.Tensor, ids_TC: torch.Tensor, weights_TC: torch.Tensor
    ) -> torch.Tensor:
        return moe_experts(x_TD, ids_TC, weights_TC, _weights(self.gate_up), _weights(self.down))


class StackedExperts(Layer):
    """Experts whose weights stand side by side: [E, 2 F, D], the gate first, and [E, D, F]."""

    def __init__(self, name: str, size: int, options: ExpertOptions, factory: ParamFactory) -> None:
        super().__init__()
        count, inner = options.num_experts, options.inner_size
        self._inner = inner
        self._numbers = {each: i for i, each in enumerate(_expert_names(name, options))}
        self.gate_up = factory.parameter(count, 2 * inner, size)
        self.down = factory.parameter(count, size, inner)

    def forward(
        self, x_TD: torch.Tensor, ids_TC: torch.Tensor, weights_TC: torch.Tensor
    ) -> torch.Tensor:
        return moe_experts(x_TD, ids_TC, weights_TC, self.gate_up, self.down)

    def pack(self, quantization: Quantization | None) -> None:
        """Quantise the loaded weights; then they are no parameters."""
        for name in ("gate_up", "down"):
            weight = getattr(self, name)
            packed = pack_experts(weight, quantization)
            if packed is not weight:
                delattr(self, name)
                vars(self)[name] = packed

    def sources(self) -> list[Source]:
        parts = ("gate_proj", "up_proj", "down_proj")
        return [self.source(f"{name}.{part}.weight") for name in self._numbers for part in parts]

    def source(self, name: str) -> Source:
        """Return the source of one name, without making those of all experts."""
        expert, part, _ = name.rsplit(".", 2)
        number = self._numbers[expert]
        if part == "down_proj":
            return Source(name, self.down[number])
        gate, up = self.gate_up[number].split(self._inner)
        return Source(name, gate if part == "gate_proj" else up)


class SparseMLP(nn.Module):
    """Sends each token to some of the experts, and adds up what they say of it."""

    def __init__(self, name: str, size: int, options: ExpertOptions, factory: ParamFactory) -> None:
        super().__init__()
        self.options = options
        self.router = Router(f"{name}.gate", size, options.num_experts, factory)
        self.experts = experts_class(factory.device)(f"{name}.experts", size, options, factory)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        options = self.options
        ids_TC, weights_TC = moe_route(self.router(x_TD), options.num_chosen, options.normalises)
        out_TD: torch.Tensor = self.experts(x_TD, ids_TC, weights_TC)
        return out_TD


def experts_class(device: torch.device) -> type[ExpertList] | type[StackedExperts]:
    """Choose the form that a device multiplies."""
    return StackedExperts if device.type == "cuda" else ExpertList


def _weights(layers: nn.ModuleList) -> list[Weight]:
    return [cast(Linear, layer).weight for layer in layers]


def _expert_names(name: str, options: ExpertOptions) -> list[str]:
    return [f"{name}.{expert}" for expert in range(options.num_experts)]
