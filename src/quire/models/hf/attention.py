"""Paged attention of quire, which replaces transformers' own.

`config._attn_implementation` names a function of transformers' AttentionInterface. transformers
calls it for each layer with queries, keys and values [1, heads, T, H]. Our function stores keys and
values in the step's blocks and attends over them with the step's backend. It finds the backend
through the attention module. No mask function is registered under this name, so transformers
creates no masks.

In a model that torch compiles, attention and quire's layers are opaque operators of the graph:
`quire::attention` and `quire::layer`.

Shape legend: T tokens, N query heads, K KV heads, H head dim.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from quire.models.hf.modules import NamedLinear
from quire.ops.attention.base import AttentionBackend
from quire.ops.attention_inputs import Scores
from quire.ops.precision import accumulation_dtype

NAME = "quire"
LAYER_ATTRIBUTE = "quire_place"  # attribute of an attention module with its PagedLayer

Operator = Callable[..., torch.Tensor]


class Tracer(Protocol):
    """Receiver of attention calls while a model is translated (lower.py)."""

    def attend(self, layer: int, qkv: tuple[torch.Tensor, ...], scores: Scores) -> torch.Tensor: ...


class _Operators:
    """Custom operators, which torch finds by name, and the models that they serve, by handle.
    Operators only accept numbers and tensors."""

    def __init__(self) -> None:
        self._models: weakref.WeakValueDictionary[int, Paged] = weakref.WeakValueDictionary()
        self._handles = itertools.count()
        made = torch.library.custom_op("quire::attention", self._attention, mutates_args=())
        made.register_fake(_fake_attention)
        self.attention: Operator = made
        made = torch.library.custom_op("quire::layer", self._layer, mutates_args=())
        made.register_fake(_fake_layer)
        self.layer: Operator = made

    def add(self, model: "Paged") -> int:
        handle = next(self._handles)
        self._models[handle] = model
        return handle

    def _attention(
        self,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKH: torch.Tensor,
        sinks_N: torch.Tensor | None,
        handle: int,
        layer: int,
        scale: float,
        soft_cap: float,
    ) -> torch.Tensor:
        model = self._models[handle]
        scores = Scores(scale, soft_cap or None, sinks_N)
        return model.attend((q_TNH, k_TKH, v_TKH), layer, scores)

    def _layer(self, x: torch.Tensor, handle: int, index: int, width: int) -> torch.Tensor:
        layer = self._models[handle].layers[index]
        made: torch.Tensor = layer.computed(x)
        return made


def _fake_attention(q_TNH: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)


def _fake_layer(x: torch.Tensor, handle: int, index: int, width: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], width)


@functools.cache
def _operators() -> _Operators:
    return _Operators()


class Paged:
    """State shared by all attention modules of a model: the backend of the current step.

    layers: layers that are opaque operators in compiled graphs.
    """

    def __init__(self) -> None:
        self.backend: AttentionBackend | None = None
        self.tracer: Tracer | None = None
        self.layers: list[NamedLinear] = []
        self.operator = _operators().attention
        self.handle = _operators().add(self)

    def make_opaque(self, layer: NamedLinear) -> None:
        """Replace a layer by an opaque operator in compiled graphs."""
        layer.opaque = _operators().layer, self.handle, len(self.layers)
        self.layers.append(layer)

    def attend(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        layer: int,
        scores: Scores,
    ) -> torch.Tensor:
        """Store keys and values [T, K, H], then attend with queries [T, N, H]. Return [T, N, H]."""
        q_TNH, k_TKH, v_TKH = map(_by_token, qkv)
        backend = self.backend
        assert backend is not None
        backend.write(layer, k_TKH, v_TKH)
        return backend.run(layer, q_TNH, scores)


def _by_token(x_TNH: torch.Tensor) -> torch.Tensor:
    """Return x_TNH with adjacent heads of each token, as all backends read them."""
    _, _, size = x_TNH.shape
    return x_TNH if x_TNH.stride()[1:] == (size, 1) else x_TNH.contiguous()


@dataclass(frozen=True, eq=False)
class PagedLayer:
    """Location of an attention module: its model's shared state and its layer number."""

    paged: Paged
    layer: int


def register() -> None:
    """Register the attention function in transformers, under NAME."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Store keys and values, and attend. query: [1, N, T, H]; key, value: [1, K, T, H]. Return [1,
    T, N, H] and no weights, as transformers' functions do. watch.py has checked the other
    arguments."""
    paged_layer: PagedLayer = getattr(module, LAYER_ATTRIBUTE)
    q_TNH, k_TKH, v_TKH = (each[0].transpose(0, 1) for each in (query, key, value))
    size, value_size = key.shape[-1], value.shape[-1]
    if value_size < size:  # pad values to the cache's width; zeros add nothing
        v_TKH = nn.functional.pad(v_TKH, (0, size - value_size))
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    cap, sinks_N = kwargs.get("softcap"), kwargs.get("s_aux")
    paged, layer = paged_layer.paged, paged_layer.layer
    sinks_N = None if sinks_N is None else sinks_N.to(accumulation_dtype(query.dtype))
    if paged.tracer is not None:
        qkv = q_TNH, k_TKH, v_TKH
        out_TNH = paged.tracer.attend(layer, qkv, Scores(scale, cap, sinks_N))
    elif torch.compiler.is_compiling():
        operands = (q_TNH, k_TKH, v_TKH, sinks_N)
        out_TNH = paged.operator(*operands, paged.handle, layer, float(scale), float(cap or 0.0))
    else:
        out_TNH = paged.attend((q_TNH, k_TKH, v_TKH), layer, Scores(scale, cap, sinks_N))
    return out_TNH[None, ..., :value_size], None
