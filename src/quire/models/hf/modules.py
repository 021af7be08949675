"""quire layers that replace the layers of a transformers model.

Shape legend: T tokens, I inputs, O outputs, D model dim, V vocabulary. transformers calls its
modules with a leading dimension of 1 before the tokens. These layers return the same leading
dimensions.

Some modules stay transformers' own. A `OwnParameters` layer next to each holds the same parameters
and their sources, so that they are loaded and counted once.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from quire.models.checkpoint.sources import Source, rows_of
from quire.models.hf.names import CheckpointNames
from quire.models.parts.layers import (
    Embedding,
    Layer,
    LayerNorm,
    Linear,
    LMHead,
    ParamFactory,
    RMSNorm,
)
from quire.ops.elementwise import scale
from quire.ops.linear import linear
from quire.ops.norms import rms_norm


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain x W^T + b, in either layout of the weight."""
    return type(module) is nn.Linear or is_turned(module)


def is_turned(module: nn.Module) -> bool:
    """Return whether the weight is stored as [inputs, outputs], as in transformers' Conv1D."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is Conv1D


class Tracer(Protocol):
    """Receiver of layer calls while a model is translated (lower.py)."""

    def embedding(self, layer: nn.Module, ids: torch.Tensor, width: int) -> torch.Tensor: ...

    def layer(
        self, layer: nn.Module, x: torch.Tensor, width: int, linear: bool
    ) -> torch.Tensor: ...


class NamedLinear(Linear):
    """Linear layer whose input has any number of dimensions before the last.

    opaque: the operator that replaces it in a compiled graph, and the handle and index of the layer
        there.
    """

    tracer: Tracer | None = None
    opaque: tuple[Callable[..., torch.Tensor], int, int] | None = None

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        checkpoint: CheckpointNames,
        factory: ParamFactory,
        keeps_dtype: bool,
    ) -> None:
        names = [name for name, _ in modules]
        first: Any = modules[0][1]
        turned = is_turned(first)
        shapes = [module.get_parameter("weight").shape for _, module in modules]
        self.part_sizes = [shape[1] if turned else shape[0] for shape in shapes]
        inputs = shapes[0][0] if turned else shapes[0][1]
        has_bias = first.bias is not None
        super().__init__(names, inputs, self.part_sizes, factory, bias=has_bias, transposed=turned)
        self._checkpoint, self.keeps_dtype = checkpoint, keeps_dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tracer is not None:
            return self.tracer.layer(self, x, sum(self.part_sizes), linear=True)
        if self.opaque is not None:
            operator, handle, index = self.opaque
            return operator(x, handle, index, sum(self.part_sizes))
        return self.computed(x)

    def computed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product, [..., O], of an input [..., I]."""
        if x.dim() == 2:
            return linear(x, self.weight, self.bias)
        out_TO = linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return out_TO.view(*x.shape[:-1], -1)

    def reorder(self, order: torch.Tensor) -> None:
        """Load the rows in this order, int64 [O]. The rows of each module must stay together."""
        begins = itertools.accumulate(self.part_sizes, initial=0)
        parts = order.split(self.part_sizes)
        self._rows = [
            rows_of(len(part), part - begin) for part, begin in zip(parts, begins, strict=False)
        ]

    def sources(self) -> list[Source]:
        return self._checkpoint.expand(super().sources())


class SharedInput(nn.Module):
    """One of several linear layers that are called with the same tensor, one after the other. The
    first call computes all of them as one product."""

    def __init__(self, product: "Product", index: int) -> None:
        super().__init__()
        self.product, self._index = product, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.part(self._index, x)


class Product(nn.Module):
    """Product that several layers share. last: index of the part that is called last."""

    def __init__(self, layer: NamedLinear, last: int) -> None:
        super().__init__()
        self.layer, self._last = layer, last
        self._input: torch.Tensor | None = None
        self._parts: Sequence[torch.Tensor] = ()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return a part of the product with x, [..., O]. The cached product is dropped after the
        last part."""
        if x is not self._input:
            self._input = x
            self._parts = self.layer(x).split(self.layer.part_sizes, dim=-1)
        found = self._parts[index]
        if index == self._last:
            self._input, self._parts = None, ()
        return found


class NamedEmbedding(Embedding):
    """Embedding table whose rows may be scaled after the look-up."""

    tracer: Tracer | None = None

    def __init__(
        self,
        name: str,
        module: nn.Embedding,
        checkpoint: CheckpointNames,
        factory: ParamFactory,
        factor: float = 1.0,
    ) -> None:
        super().__init__(name, module.num_embeddings, module.embedding_dim, factory)
        self._checkpoint, self._factor = checkpoint, factor

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tracer is not None:
            return self.tracer.embedding(self, ids, self.weight.shape[1])
        rows_TD = super().forward(ids.reshape(-1))
        if self._factor != 1.0:
            rows_TD = scale(rows_TD, self._factor)
        return rows_TD.view(*ids.shape, -1)

    def sources(self) -> list[Source]:
        return self._checkpoint.expand(super().sources())


class NamedRMSNorm(RMSNorm):
    """RMSNorm without an addition, over the last of any number of dimensions."""

    tracer: Tracer | None = None

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        offset: float,
        checkpoint: CheckpointNames,
        factory: ParamFactory,
    ) -> None:
        super().__init__(name, size, eps, factory, offset)
        self._checkpoint, self.eps = checkpoint, eps

    def forward(self, x: torch.Tensor, _: Any = None) -> Any:
        if self.tracer is not None:
            return self.tracer.layer(self, x, x.shape[-1], linear=False)
        return rms_norm(x, self.weight, self.eps)

    def sources(self) -> list[Source]:
        return self._checkpoint.expand(super().sources())


class NamedLayerNorm(LayerNorm):
    """LayerNorm over the last of any number of dimensions. parts: names of its parameters."""

    tracer: Tracer | None = None

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        parts: Sequence[str],
        checkpoint: CheckpointNames,
        factory: ParamFactory,
    ) -> None:
        has = "weight" in parts, "bias" in parts
        super().__init__(name, size, eps, factory, *has)
        self._checkpoint = checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tracer is not None:
            return self.tracer.layer(self, x, x.shape[-1], linear=False)
        return super().forward(x)

    def sources(self) -> list[Source]:
        return self._checkpoint.expand(super().sources())


class NamedHead(LMHead):
    """Output head that may have a bias."""

    def __init__(
        self,
        name: str,
        module: nn.Linear,
        checkpoint: CheckpointNames,
        factory: ParamFactory,
        tied: Embedding | None,
    ) -> None:
        super().__init__(name, module.out_features, module.in_features, factory, tied)
        self._checkpoint = checkpoint
        self.bias = factory.parameter(module.out_features) if module.bias is not None else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out_RV = linear(hidden.reshape(-1, hidden.shape[-1]), self.weight, self.bias)
        return out_RV.view(*hidden.shape[:-1], -1)

    def sources(self) -> list[Source]:
        own = super().sources()
        if self.bias is not None:
            own.append(Source(f"{self._name}.bias", self.bias))
        return self._checkpoint.expand(own)


class OwnParameters(Layer):
    """Parameters, and buffers stored in checkpoints, of a module that stays transformers' own.
    wide: whether they stay in float32."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        checkpoint: CheckpointNames,
        factory: ParamFactory,
        wide: bool,
    ) -> None:
        super().__init__()
        self._name, self._checkpoint = name, checkpoint
        found: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
        found |= stored_buffers(module)
        for each, values in found.items():
            dtype = torch.float32 if wide else values.dtype
            made = factory.parameter(*values.shape, dtype=dtype)
            delattr(module, each)
            module.register_parameter(each, made)
            self.register_parameter(each, made)

    def sources(self) -> list[Source]:
        return self._checkpoint.expand(
            [Source(f"{self._name}.{each}", p) for each, p in self.named_parameters()]
        )

    def source(self, name: str) -> Source:
        """Return the source of one name, without creating the sources of all experts."""
        target = self._checkpoint.target(name)
        each = target.removeprefix(f"{self._name}.")
        return self._checkpoint.sliced_source(name, Source(target, self.get_parameter(each)))


def stored_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers that checkpoints store."""
    passing = module._non_persistent_buffers_set
    return {
        name: values for name, values in module.named_buffers(recurse=False) if name not in passing
    }
