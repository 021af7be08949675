"""The layers that all architectures are made of.

Shape legend: T tokens, R rows, D model dim, F feed-forward dim, V vocabulary, N heads, K KV heads,
H head dim, I inputs, O outputs.

Each layer holds its parameters and says, as `sources()`, which checkpoint tensors fill them: merged
parameters (queries, keys and values; gate and up) have one source per part. Layers are made with
uninitialised memory on the target device; `loading.py` fills it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.rank_place import WHOLE, RankPlace
from quire.ops.add import add
from quire.ops.attention.base import AttentionBackend
from quire.ops.embedding import embedding
from quire.ops.formats import Quantization
from quire.ops.gelu import gelu, gelu_tanh
from quire.ops.host_memory import HugeMemory
from quire.ops.layer_norm import layer_norm
from quire.ops.linear import Weight, linear, pack_weight
from quire.ops.opaque import OpaqueWeight
from quire.ops.precision import accumulation_dtype
from quire.ops.relu import relu
from quire.ops.rms_norm import add_rms_norm, rms_norm


@dataclass(frozen=True)
class ParamFactory:
    """Makes a model's parameters: where, in which precision, and for which part of the model."""

    dtype: torch.dtype
    device: torch.device
    place: RankPlace = WHOLE

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Uninitialised memory of this shape. dtype: another than the model's."""
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def exact_parameter(self, *shape: int) -> nn.Parameter:
        """The same in at least 32 bits."""
        return self.parameter(*shape, dtype=accumulation_dtype(self.dtype))


@dataclass(frozen=True)
class Part:
    """What a source takes of a checkpoint's tensor: of one dimension `count` places from `first`
    on. whole: the shape of the tensor."""

    dimension: int
    first: int
    count: int
    whole: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor and the part of a parameter that it fills.

    part: of the tensor, if not all of it; what is left is read in the destination's shape.
    transposed: the checkpoint holds that with its last two dimensions exchanged.
    repeated: the checkpoint holds one row of it, which fills all rows.
    order: int64, which of the checkpoint's rows each row here is; None: the same. Of a repeated row
    its elements are meant, of another tensor `order_dimension`.
    offset: is added to every value. is_logarithm: the checkpoint holds the values' logarithms.
    """

    name: str
    destination: torch.Tensor
    transposed: bool = False
    repeated: bool = False
    part: Part | None = None
    order: torch.Tensor | None = None
    offset: float = 0.0
    order_dimension: int = 0
    is_logarithm: bool = False

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """The shape that the checkpoint's tensor must have."""
        return self.stored_shape if self.part is None else self.part.whole

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of what is taken of it, as it is stored."""
        shape = tuple(self.destination.shape)
        if self.repeated:
            return shape[1:]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape

    def taken(self, values: torch.Tensor) -> torch.Tensor:
        """Return what the source takes of the checkpoint's tensor, in the destination's shape; a
        view where that can be."""
        if self.part is not None:
            part = self.part
            values = values.narrow(part.dimension, part.first, part.count)
        values = values.reshape(self.stored_shape)
        if self.transposed:
            values = values.transpose(-2, -1)
        if self.order is not None:
            values = values.index_select(self.order_dimension, self.order.to(values.device))
        return values

    def fill(self, values: torch.Tensor) -> None:
        """Copy the checkpoint's tensor to where it belongs, converting its dtype."""
        self.destination.copy_(self.taken(values))
        if self.offset:
            self.destination.add_(self.offset)
        if self.is_logarithm:
            self.destination.exp_()


class Layer(nn.Module):
    """A layer with parameters of its own. neutral: what those of these names are filled with where
    there is no checkpoint; others with random numbers."""

    neutral: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def sources(self) -> list[Source]:
        """The checkpoint tensors that fill this layer's own parameters (not its children's)."""
        raise NotImplementedError

    def source(self, name: str) -> Source:
        """Return the source of this name, which must be among them."""
        return next(source for source in self.sources() if source.name == name)


def set_weight(layer: Layer, weight: Weight) -> None:
    """Replace the parameter `weight`. A packed one is no parameter."""
    if weight is layer.weight:
        return
    del layer.weight
    if isinstance(weight, OpaqueWeight):
        vars(layer)["weight"] = weight
    else:
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


class Linear(Layer):
    """x W^T + b, of one or several checkpoint modules with the same inputs, merged.

    names: the checkpoint's modules, outputs: how many rows of the merged weight each has. orders:
    of each module which of the checkpoint's rows each row here is; None: the same.
    """

    keeps_dtype = False  # whether it is left out where layers are quantised

    def __init__(
        self,
        names: Sequence[str],
        inputs: int,
        outputs: Sequence[int],
        factory: ParamFactory,
        *,
        bias: bool = False,
        transposed: bool = False,
        orders: Sequence[torch.Tensor | None] = (),
    ) -> None:
        super().__init__()
        self._names, self._outputs, self._transposed = tuple(names), tuple(outputs), transposed
        self._orders = tuple(orders) or (None,) * len(self._names)
        self.weight = factory.parameter(sum(outputs), inputs)
        self.bias = factory.parameter(sum(outputs)) if bias else None

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        return linear(x_TI, self.weight, self.bias)

    def sources(self) -> list[Source]:
        weights = self.weight.split(self._outputs)
        parts = [
            Source(f"{name}.weight", part, self._transposed, order=order)
            for name, part, order in zip(self._names, weights, self._orders, strict=True)
        ]
        if self.bias is not None:
            biases = self.bias.split(self._outputs)
            parts += [
                Source(f"{name}.bias", part, order=order)
                for name, part, order in zip(self._names, biases, self._orders, strict=True)
            ]
        return parts

    def pack(
        self, quantization: Quantization | None = None, memory: HugeMemory | None = None
    ) -> None:
        """Put the loaded weight in the order that the device multiplies fastest with."""
        set_weight(self, pack_weight(self.weight, quantization, memory))


class Embedding(Layer):
    """A table of vectors. `first_row`: rows before it are never looked up (OPT's positions)."""

    def __init__(
        self, name: str, rows: int, size: int, factory: ParamFactory, first_row: int = 0
    ) -> None:
        super().__init__()
        self._name, self._first_row, self._dtype = name, first_row, factory.dtype
        self.weight = factory.parameter(first_row + rows, size)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, OpaqueWeight):
            return embedding(ids_T, self.weight, self._dtype)
        return embedding(ids_T, self.weight[self._first_row :])

    def sources(self) -> list[Source]:
        return [Source(f"{self._name}.weight", self.weight)]

    def share(self, head: Weight) -> None:
        """Look up in the packed weight of the head that is tied to this table, instead of keeping
        the table beside it, if the head's serves that. oneDNN's have no rows."""
        if isinstance(head, OpaqueWeight) and head.serves_look_up and not self._first_row:
            set_weight(self, head)


class LMHead(Layer):
    """Logits from hidden states; tied to the embedding if the model says so.

    A tied head costs no memory until it is packed; then the embedding looks up in its packed
    weight, or where that is not possible keeps its own table beside it.
    """

    def __init__(
        self, name: str, vocab_size: int, size: int, factory: ParamFactory, tied: Embedding | None
    ) -> None:
        super().__init__()
        self._name, self._is_tied = name, tied is not None
        self.weight = factory.parameter(vocab_size, size) if tied is None else tied.weight

    def forward(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """[R, V] in the model's dtype."""
        return linear(hidden_RD, self.weight)

    def sources(self) -> list[Source]:
        return [] if self._is_tied else [Source(f"{self._name}.weight", self.weight)]

    def pack(
        self, quantization: Quantization | None = None, memory: HugeMemory | None = None
    ) -> None:
        """Pack as Linear does; the embedding keeps its table."""
        set_weight(self, pack_weight(self.weight, quantization, memory))


class RMSNorm(Layer):
    """RMS normalisation, fused with the residual addition before it where there is one.

    offset: is added to the checkpoint's weight; then the sum is kept in at least 32 bits.
    """

    neutral = MappingProxyType({"weight": 1.0})

    def __init__(
        self, name: str, size: int, eps: float, factory: ParamFactory, offset: float = 0.0
    ) -> None:
        super().__init__()
        self._name, self._eps, self._offset = name, eps, offset
        self.weight = factory.exact_parameter(size) if offset else factory.parameter(size)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (the normalised sum, the sum); without a residual the sum is x itself."""
        if residual_TD is None:
            return rms_norm(x_TD, self.weight, self._eps), x_TD
        return add_rms_norm(x_TD, residual_TD, self.weight, self._eps)

    def sources(self) -> list[Source]:
        return [Source(f"{self._name}.weight", self.weight, offset=self._offset)]


class HeadNorm(Layer):
    """RMS normalisation of each query and key head, with one weight for all heads of a kind.

    The weights of both kinds stand side by side, so that one operation does queries and keys.
    offset: as of RMSNorm. order: of a head's dimensions, where rotation needs another.
    """

    neutral = MappingProxyType({"weight": 1.0})

    def __init__(
        self,
        names: tuple[str, str],
        heads: tuple[int, int],
        size: int,
        eps: float,
        factory: ParamFactory,
        *,
        offset: float = 0.0,
        order: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self._names, self._heads, self.eps = names, heads, eps
        self._offset, self._order = offset, order
        make = factory.exact_parameter if offset else factory.parameter
        self.weight = make(sum(heads), size)

    def sources(self) -> list[Source]:
        return [
            Source(f"{name}.weight", part, repeated=True, order=self._order, offset=self._offset)
            for name, part in zip(self._names, self.weight.split(self._heads), strict=True)
        ]


class LayerNorm(Layer):
    """Layer normalisation. affine: with weight and bias; has_bias: whether with the latter."""

    neutral = MappingProxyType({"weight": 1.0, "bias": 0.0})

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        factory: ParamFactory,
        affine: bool = True,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self._name, self._eps = name, eps
        self.weight = factory.parameter(size) if affine else None
        self.bias = factory.parameter(size) if affine and has_bias else None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return layer_norm(x_TD, self.weight, self.bias, self._eps)

    def sources(self) -> list[Source]:
        parts = {"weight": self.weight, "bias": self.bias}
        return [
            Source(f"{self._name}.{kind}", part) for kind, part in parts.items() if part is not None
        ]


class StreamNorm(nn.Module):
    """Layer normalisation of the residual stream, called as RMSNorm is."""

    def __init__(self, norm: LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_TD = x_TD if residual_TD is None else add(x_TD, residual_TD)
        return self.norm(total_TD), total_TD


class Sinks(Layer):
    """A logit for each query head that takes part in its softmax and has no value (gpt-oss)."""

    def __init__(self, name: str, num_heads: int, factory: ParamFactory) -> None:
        super().__init__()
        self._name = name
        self.weight = factory.exact_parameter(num_heads)

    def sources(self) -> list[Source]:
        return [Source(self._name, self.weight)]


@dataclass(frozen=True)
class Attention:
    """One layer's attention over paged memory. soft_cap: as `AttentionBackend.run` has it; so are
    the sinks, a parameter of the layer that owns this."""

    layer: int
    scale: float
    soft_cap: float | None = None

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        backend: AttentionBackend,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store keys and values, then attend; returns the heads side by side [T, N * H]."""
        backend.write(self.layer, k_TKH, v_TKH)
        return self.stored(q_TNH, backend, sinks_N)

    def stored(
        self, q_TNH: torch.Tensor, backend: AttentionBackend, sinks_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The same, where keys and values are stored already."""
        out_TNH = backend.run(
            self.layer, q_TNH, self.scale, soft_cap=self.soft_cap, sinks_N=sinks_N
        )
        return out_TNH.flatten(1)


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_fast": gelu_tanh,  # but for the tenth digit of its constant
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that a config names. Raises ModelError for one that does not exist."""
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ModelError(f"the activation {name!r} is not supported; supported are {known}.")
    return ACTIVATIONS[name]
