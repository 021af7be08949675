"""The layers that all architectures share.

Shape legend: T tokens, R rows, D model dim, F feed-forward dim, V vocabulary, N heads, K KV heads,
H head dim, I inputs, O outputs.

Each layer holds its parameters and lists the checkpoint tensors that fill them (`sources()`).
Merged parameters (queries, keys and values; gate and up) have one source per part. Layers have
uninitialised memory on the target device until `loading.py` fills it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import ClassVar, Protocol

import torch
from torch import nn

from quire.base.errors import ModelError
from quire.models.checkpoint.rank_place import WHOLE, RankPlace
from quire.models.checkpoint.sources import ALL, Rows, Source, Stretches, rows_of
from quire.ops.adapters import Slots, add_adapters
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention_inputs import Scores
from quire.ops.collective import RankGroup, all_reduce
from quire.ops.elementwise import (
    add,
    gelu,
    gelu_mul,
    gelu_tanh,
    gelu_tanh_mul,
    pad_width,
    relu,
    silu_mul,
)
from quire.ops.embedding import embedding, part_of_embedding
from quire.ops.fused_linear import (
    ACTIVATIONS as FUSED_GATES,
)
from quire.ops.fused_linear import (
    Gate,
    fuses,
    gates,
    linear_add,
    linear_gate,
    normed_gate,
    normed_linear,
)
from quire.ops.host.host_memory import HugeMemory
from quire.ops.linear import linear
from quire.ops.norms import add_rms_norm, layer_norm, rms_norm
from quire.ops.precision import accumulation_dtype
from quire.ops.weights.device_weights import Weight, pack_weight
from quire.ops.weights.formats import Quantization
from quire.ops.weights.opaque import OpaqueWeight
from quire.spec.cuts import Cut, all_of


@dataclass(frozen=True)
class ParamFactory:
    """Allocates a model's parameters in one dtype, on one device, for one rank's part."""

    dtype: torch.dtype
    device: torch.device
    place: RankPlace = WHOLE

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return an uninitialised parameter. dtype: None for the model's dtype."""
        values = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def exact_parameter(self, *shape: int) -> nn.Parameter:
        """Return an uninitialised parameter of at least 32 bits per value."""
        return self.parameter(*shape, dtype=accumulation_dtype(self.dtype))


class Layer(nn.Module):
    """A layer with parameters of its own. neutral: initial values by parameter name, for runs
    without a checkpoint; other parameters get random values."""

    neutral: ClassVar[Mapping[str, float]] = MappingProxyType({})

    def sources(self) -> list[Source]:
        """List the checkpoint tensors that fill this layer's own parameters, without children."""
        raise NotImplementedError

    def stretches(self, name: str) -> Stretches:
        """Return the rows and columns of the whole model's parameter that this rank holds."""
        return ALL

    def source(self, name: str) -> Source:
        """Return the source with this tensor name, which must exist."""
        return next(source for source in self.sources() if source.name == name)


def set_weight(layer: Layer, weight: torch.Tensor | OpaqueWeight) -> None:
    """Replace a layer's `weight`, such as [N, K]. A packed weight becomes a plain attribute, not a
    parameter."""
    if weight is layer.weight:
        return
    del layer.weight
    if isinstance(weight, OpaqueWeight):
        vars(layer)["weight"] = weight
    else:
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


class Linear(Layer):
    """x W^T + b; merges one or several checkpoint modules with the same inputs.

    names: the checkpoint modules. inputs: number of inputs, or this rank's part; ranks with a part
    of the inputs sum their outputs. outputs: number of outputs of each module, or this rank's part
    or parts. orders: for each module, the checkpoint row of each row; None keeps the order.
    """

    keeps_dtype = False  # whether quantization skips this layer
    # Slots for adapters, and the layer's number there; set where adapters are enabled.
    adapted: tuple[Slots, int] | None = None

    def __init__(
        self,
        names: Sequence[str],
        inputs: int | Cut,
        outputs: Sequence[int | Cut | Sequence[Cut]],
        factory: ParamFactory,
        *,
        bias: bool = False,
        transposed: bool = False,
        orders: Sequence[torch.Tensor | None] = (),
    ) -> None:
        super().__init__()
        self._names, self._transposed = tuple(names), transposed
        of_all = orders or (None,) * len(self._names)
        self._rows = [rows_of(*each) for each in zip(outputs, of_all, strict=True)]
        cut = inputs if isinstance(inputs, Cut) else all_of(inputs)
        self._columns, self._group = None if cut.is_whole else cut, _sharing(cut, factory)
        num_outputs = sum(self._outputs)
        self.weight = factory.parameter(num_outputs, cut.count)
        self.bias = factory.parameter(num_outputs) if bias else None

    @property
    def _outputs(self) -> list[int]:
        """Return each module's number of rows in the merged weight."""
        return [rows.count for rows in self._rows]

    def forward(self, x_TI: torch.Tensor) -> torch.Tensor:
        out_TO = linear(x_TI, self.weight, self.bias)
        if self.adapted is not None and not self.adapted[0].is_idle:
            add_adapters(out_TO, x_TI, *self.adapted)
        return out_TO if self._group is None else all_reduce(out_TO, self._group)

    def forward_gated(self, x_TD: torch.Tensor, gate: Gate) -> torch.Tensor:
        """Return the gate's result for the outputs, [T, O / 2], by one launch if possible."""
        if self._is_plain and gate in FUSED_GATES and gates(x_TD, self.weight):
            return linear_gate(x_TD, self.weight, self.bias, gate)
        return gate(self.forward(x_TD))

    def fuses(self, x_TD: torch.Tensor, *, has_norm: bool = False) -> bool:
        """Return whether one launch computes `forward_normed`, with has_norm, or `forward_added`
        for the tokens of x [T, D]."""
        return self._is_plain and fuses(x_TD, self.weight, has_norm=has_norm)

    @property
    def _is_plain(self) -> bool:
        """Return whether one product computes the outputs."""
        return self._group is None and (self.adapted is None or self.adapted[0].is_idle)

    def forward_normed(
        self, x_TD: torch.Tensor, norm: "RMSNorm", gate: Gate | None = None
    ) -> torch.Tensor:
        """Return the outputs for norm(x), [T, O], or the gate's result for them, [T, O / 2]."""
        operands = x_TD, norm.weight, norm.eps, self.weight, self.bias
        return normed_linear(*operands) if gate is None else normed_gate(*operands, gate)

    def forward_added(self, x_TI: torch.Tensor, residual_TO: torch.Tensor) -> torch.Tensor:
        """Return the outputs plus the residual, [T, O]."""
        return linear_add(x_TI, self.weight, self.bias, residual_TO)

    def sources(self) -> list[Source]:
        names, taken = self._names, [rows.taken() for rows in self._rows]
        weights = self.weight.split(self._outputs)
        parts = [
            Source(
                f"{name}.weight",
                part,
                self._transposed,
                rows=rows,
                order=order,
                columns=self._columns,
            )
            for name, part, (rows, order) in zip(names, weights, taken, strict=True)
        ]
        if self.bias is not None:
            biases, elsewhere = self.bias.split(self._outputs), is_added_elsewhere(self._columns)
            parts += [
                Source(f"{name}.bias", part, rows=rows, order=order, is_elsewhere=elsewhere)
                for name, part, (rows, order) in zip(names, biases, taken, strict=True)
            ]
        return parts

    @property
    def module_rows(self) -> tuple[tuple[str, Rows], ...]:
        """Return each checkpoint module and its rows, in the order of the outputs."""
        return tuple(zip(self._names, self._rows, strict=True))

    @property
    def is_transposed(self) -> bool:
        """Return whether the checkpoint holds the weight as [inputs, outputs]."""
        return self._transposed

    @property
    def columns(self) -> Cut | None:
        """Return this rank's part of the inputs; None for all."""
        return self._columns

    def stretches(self, name: str) -> Stretches:
        """See Layer."""
        cuts = tuple(cut for rows in self._rows for cut in rows.cuts)
        return Stretches(cuts, self._columns if name == "weight" else None)

    def pack(
        self, quantization: Quantization | None = None, memory: HugeMemory | None = None
    ) -> None:
        """Pack the loaded weight in the device's fastest layout, quantised if requested."""
        set_weight(self, pack_weight(self.weight, quantization, memory))


def _sharing(cut: Cut, factory: ParamFactory) -> RankGroup | None:
    """Return the ranks that share a layer with this part; None if the rank holds all of it."""
    return None if cut.is_whole else factory.place.tensor


def is_added_elsewhere(columns: Cut | None) -> bool:
    """Return whether another rank adds the bias. Where ranks sum partial outputs, only the rank
    with the first inputs adds it."""
    return columns is not None and columns.first > 0


class Embedding(Layer):
    """A table of vectors. rows: number of rows, or this rank's part; ranks with a part sum their
    results. first_row: checkpoint rows to skip before id 0 (OPT's positions)."""

    def __init__(
        self, name: str, rows: int | Cut, size: int, factory: ParamFactory, first_row: int = 0
    ) -> None:
        super().__init__()
        self._name, self._first_row, self._dtype = name, first_row, factory.dtype
        cut = rows if isinstance(rows, Cut) else all_of(first_row + rows)
        self._rows, self._group = None if cut.is_whole else cut, _sharing(cut, factory)
        self.weight = factory.parameter(cut.count, size)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = self.weight
        if not isinstance(table, OpaqueWeight) and self._first_row:
            table = table[self._first_row :]
        if self._rows is None or self._group is None:
            return embedding(ids_T, table, self._dtype)
        found_TD = part_of_embedding(ids_T, table, self._rows.first, self._dtype)
        return all_reduce(found_TD, self._group)

    def sources(self) -> list[Source]:
        return [Source(f"{self._name}.weight", self.weight, rows=self._rows)]

    def stretches(self, name: str) -> Stretches:
        """See Layer."""
        return ALL if self._rows is None else Stretches((self._rows,))

    def share(self, head: Weight) -> None:
        """Replace this table by the packed weight of the tied head, if that supports row look-ups.
        Weights packed by oneDNN do not."""
        if isinstance(head, OpaqueWeight) and head.serves_look_up and not self._first_row:
            set_weight(self, head)


class LMHead(Layer):
    """The projection of hidden states to logits, tied to the embedding in some models.

    vocabulary: number of tokens, or this rank's part. A tied head shares the embedding's table
    before packing. Afterwards `Embedding.share` lets the embedding read the packed weight, if
    possible.
    """

    def __init__(
        self,
        name: str,
        vocabulary: int | Cut,
        size: int,
        factory: ParamFactory,
        tied: Embedding | None,
    ) -> None:
        super().__init__()
        self._name, self._is_tied = name, tied is not None
        cut = vocabulary if isinstance(vocabulary, Cut) else all_of(vocabulary)
        self._rows, self._width = None if cut.is_whole else cut, cut.count
        if not cut.is_whole:
            self._width = -(-cut.whole // factory.place.tensor.size)
        self.weight = factory.parameter(cut.count, size) if tied is None else tied.weight

    def forward(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] in the model's dtype. Under tensor parallelism V counts the rank's
        tokens, padded to an equal number on all ranks."""
        logits_RV = linear(hidden_RD, self.weight)
        is_short = self._width > logits_RV.shape[1]
        return pad_width(logits_RV, self._width) if is_short else logits_RV

    def sources(self) -> list[Source]:
        if self._is_tied:
            return []
        return [Source(f"{self._name}.weight", self.weight, rows=self._rows)]

    def stretches(self, name: str) -> Stretches:
        """See Layer."""
        return ALL if self._rows is None else Stretches((self._rows,))

    def pack(
        self, quantization: Quantization | None = None, memory: HugeMemory | None = None
    ) -> None:
        """Pack the weight as Linear does; the embedding keeps its table."""
        set_weight(self, pack_weight(self.weight, quantization, memory))


class RMSNorm(Layer):
    """RMS normalisation, fused with the preceding residual addition, if any.

    offset: added to the checkpoint's weight; if not 0, the sum has at least 32 bits.
    """

    neutral = MappingProxyType({"weight": 1.0})

    def __init__(
        self, name: str, size: int, eps: float, factory: ParamFactory, offset: float = 0.0
    ) -> None:
        super().__init__()
        self._name, self.eps, self._offset = name, eps, offset
        self.weight = factory.exact_parameter(size) if offset else factory.parameter(size)

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised sum and the sum, each [T, D]; without a residual the sum is x."""
        if residual_TD is None:
            return rms_norm(x_TD, self.weight, self.eps), x_TD
        return add_rms_norm(x_TD, residual_TD, self.weight, self.eps)

    def sources(self) -> list[Source]:
        return [Source(f"{self._name}.weight", self.weight, offset=self._offset)]


class HeadNorm(Layer):
    """RMS normalisation of each query and key head, with one weight for all heads of a kind.

    One parameter [query heads + key heads, H] holds both weights, so that one operation normalises
    queries and keys. offset: see RMSNorm. order: permutation of a head's dimensions for rotation.
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
    """Layer normalisation. affine: whether it has a weight. has_bias: whether an affine one has a
    bias."""

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
    """Layer normalisation of the residual stream, with the call signature of RMSNorm."""

    def __init__(self, norm: LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total_TD = x_TD if residual_TD is None else add(x_TD, residual_TD)
        return self.norm(total_TD), total_TD


class Sinks(Layer):
    """Attention sinks (gpt-oss): one logit per query head that enters the softmax without a
    value."""

    def __init__(self, name: str, heads: Cut, factory: ParamFactory) -> None:
        super().__init__()
        self._name, self._rows = name, rows_of(heads)
        self.weight = factory.exact_parameter(heads.count)

    def sources(self) -> list[Source]:
        rows, order = self._rows.taken()
        return [Source(self._name, self.weight, rows=rows, order=order)]

    def stretches(self, name: str) -> Stretches:
        """See Layer."""
        return Stretches(self._rows.cuts)


class HeadWeights(Protocol):
    """The norm of query and key heads: weights [N + K, H], and what is added to the mean square."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def eps(self) -> float: ...


@dataclass
class Attention:
    """One layer's attention over paged memory. `scores` stores the sinks of the latest call."""

    layer: int
    scores: Scores

    def __call__(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        backend: AttentionBackend,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to the cache, attend, and return the heads, [T, N * H]."""
        backend.write(self.layer, k_TKH, v_TKH)
        return self.stored(q_TNH, backend, sinks_N)

    def stored(
        self, q_TNH: torch.Tensor, backend: AttentionBackend, sinks_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend over keys and values that are already in the cache; return [T, N * H]."""
        self._set_sinks(sinks_N)
        return backend.run(self.layer, q_TNH, self.scores).flatten(1)

    def rotated(
        self,
        qkv_TMH: torch.Tensor,
        num_kv_heads: int,
        rotary_rows: torch.Tensor,
        norm: HeadWeights | None,
        backend: AttentionBackend,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normalise and rotate the heads, write keys and values, attend, and return [T, N * H].
        norm: None for heads without norms."""
        self._set_sinks(sinks_N)
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        turned = rotary_rows, weight, eps
        return backend.rotary_run(self.layer, qkv_TMH, num_kv_heads, *turned, self.scores).flatten(
            1
        )

    def _set_sinks(self, sinks_N: torch.Tensor | None) -> None:
        if sinks_N is not self.scores.sinks_N:
            self.scores = replace(self.scores, sinks_N=sinks_N)


Function = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Function] = {
    "gelu": gelu,
    "gelu_fast": gelu_tanh,  # equal up to the tenth digit of its constant
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python": gelu,
    "relu": relu,
}
# base/model_options.GATES has the same names: it refuses others without torch.
GATES: dict[str, Function] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu": gelu_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
    "gelu_new": gelu_tanh_mul,
}


def activation(name: str, known: Mapping[str, Function] = ACTIVATIONS) -> Function:
    """Return the function that a config names. Raises ModelError for an unknown name."""
    if name not in known:
        raise ModelError(
            f"the activation {name!r} is not supported; supported are {', '.join(known)}."
        )
    return known[name]
