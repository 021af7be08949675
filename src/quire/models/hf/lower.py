"""Translation of a transformers model into quire's operations (steps.py), which then run like our
own models.

The model's forward pass is followed on a few tokens (follow.py). Whenever it calls a quire layer or
attention, the terms of the arguments are known. They determine the operations that compute the
arguments from results of earlier layers: none, a sum, a gate, a rotation.

Shape legend: T tokens, W columns, N heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from quire.models.hf import terms as algebra
from quire.models.hf.arrange import Buffer, Call, Columns, Operand
from quire.models.hf.follow import Follower
from quire.models.hf.recognise import Column, rotation
from quire.models.hf.steps import ATTEND, EMBEDDING, LAYER, ROTARY, ROW_WISE, SCALE
from quire.models.hf.terms import NOTHING, ONE, Terms, Unfollowed
from quire.ops.attention_inputs import Scores

NUM_TOKENS = 3


class Lowering:
    """Tracer that quire's layers call instead of computing, while a model is followed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.buffers: list[Buffer] = []
        self.ids = torch.arange(NUM_TOKENS)[None]
        self.positions = torch.arange(NUM_TOKENS)[None]
        self._follower = Follower(self._add)
        self._random = torch.Generator().manual_seed(0)
        self._frequencies: dict[bytes, torch.Tensor] = {}

    def follow(self, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Operand:
        """Run a model on ids and positions, both int64 [1, T]. Return the columns of its result.
        Raise Unfollowed if an operation is not supported."""
        self._follower.begin(self.positions, algebra.angles(self.positions))
        self._follower.refuse(self.ids, "token ids are computed with")
        with torch.no_grad(), self._follower:
            hidden = run(self.ids, self.positions)
        return self._operand(hidden)[0]

    # ---- called by layers ----

    def embedding(self, layer: nn.Module, ids: torch.Tensor, width: int) -> torch.Tensor:
        with _disable_current_modes():
            if ids.data_ptr() != self.ids.data_ptr():
                raise Unfollowed("a table looks up something other than the tokens")
            return self._returned(EMBEDDING, (), layer, (*ids.shape, width), 1)

    def layer(self, layer: nn.Module, x: torch.Tensor, width: int, linear: bool) -> torch.Tensor:
        """Record a linear layer, or else a norm, over the last dimension of x [..., W]. Return
        random results [..., width]."""
        with _disable_current_modes():
            operand, at = self._operand(x, by_head=not linear)
            return self._returned(LAYER, (operand,), layer, (*x.shape[:-1], width), at, linear)

    def attend(self, layer: int, qkv: tuple[torch.Tensor, ...], scores: Scores) -> torch.Tensor:
        """Record attention of queries, keys and values, each [T, heads, H]. Return random
        results."""
        with _disable_current_modes():
            if scores.sinks_N is not None:
                raise Unfollowed("attention has sinks")
            found = [self._operand(each, by_head=True)[0] for each in qkv]
            reads = [replace(each, heads=x.shape[1]) for each, x in zip(found, qkv, strict=True)]
            if reads[0].order != reads[1].order or reads[2].order:
                raise Unfollowed("queries and keys are rotated in different ways")
            shape = tuple(qkv[0].shape)
            return self._returned(ATTEND, tuple(reads), layer, shape, 0, options=(scores,))

    def _returned(
        self,
        name: str,
        reads: tuple[Operand, ...],
        layer: Any,
        shape: tuple[int, ...],
        at: int,
        linear: bool = False,
        options: tuple[Any, ...] = (),
    ) -> torch.Tensor:
        """Record a layer's call and return random numbers of this shape. at: the token
        dimension."""
        made = torch.randn(shape, generator=self._random)
        rows = made.movedim(at, 0).reshape(NUM_TOKENS, -1)
        columns = self._emit(name, reads, rows.shape[1], layer, options, linear)
        self.calls[-1].returned = rows
        self._follower.begin(made, self._elements(columns, shape, at))
        return made

    # ---- operations between layers ----

    def _add(self, total: torch.Tensor, terms: Terms) -> None:
        """Emit the sum of results of several layers as a result of its own."""
        at, found = _by_token(terms)
        parts = [self._plain(found, [index]) for index in range(len(terms.terms))]
        columns = parts[0]
        for other in parts[1:]:
            reads = Operand(columns), Operand(other)
            columns = self._emit("add", reads, len(columns))
        self._follower.begin(total, self._elements(columns, tuple(total.shape), at))

    def _operand(self, tensor: torch.Tensor, by_head: bool = False) -> tuple[Operand, int]:
        """Emit the operations that compute a tensor. Return the columns of the result, and the
        dimension of the tensor's tokens."""
        terms = self._follower.of(tensor)
        at, found = _by_token(terms)
        size = tensor.shape[-1]
        heads, order = found.source.shape[1] // size, ""
        if terms.activation:
            columns = self._activated(terms.activation, found)
        elif (found.kind[found.coefficient != 0] == ONE).all():
            columns = self._plain(found, range(len(terms.terms)))
        else:
            turn = rotation(found, heads)
            frequencies = self._shared(turn.frequencies)
            reads = (Operand(turn.columns, heads),)
            columns = self._emit(
                ROTARY, reads, len(turn.columns), options=(frequencies, turn.scale)
            )
            order = ",".join(map(str, turn.order)) if (np.diff(turn.order) != 1).any() else ""
        shown = tensor.movedim(at, 0).reshape(NUM_TOKENS, -1)
        if order:
            shown = shown.unflatten(1, (heads, size))[..., turn.order].flatten(1)
        return Operand(columns, heads if by_head and heads > 1 else 0, order, shown), at

    def _plain(self, found: Column, terms: Any) -> Columns:
        """Return the columns of one term, scaled if it has a coefficient. terms: indices of the
        candidate terms, of which only one may be nonzero."""
        live = [index for index in terms if (found.coefficient[index] != 0).any()]
        if len(live) != 1:
            raise Unfollowed("columns of several results are mixed")
        source: Columns = found.source[live[0]]
        factors = found.coefficient[live[0]]
        if (factors != factors[0]).any() or (source == NOTHING).any():
            raise Unfollowed("columns are scaled by different numbers")
        if factors[0] == 1.0:
            return source
        return self._emit(SCALE, (Operand(source),), len(source), options=(float(factors[0]),))

    def _activated(self, name: str, found: Column) -> Columns:
        if name not in ROW_WISE:
            raise Unfollowed(f"there is no operation for {name}")
        if (found.coefficient != 1.0).any():
            raise Unfollowed("the input of an activation is scaled")
        return self._emit(name, (Operand(found.source.reshape(-1)),), found.source.shape[1])

    def _emit(
        self,
        name: str,
        reads: tuple[Operand, ...],
        width: int,
        layer: Any = None,
        options: tuple[Any, ...] = (),
        linear: bool = False,
    ) -> Columns:
        first = self.buffers[-1].first + self.buffers[-1].width if self.buffers else 0
        self.buffers.append(Buffer(first, width, layer if linear else None))
        self.calls.append(Call(name, reads, len(self.buffers) - 1, layer, options))
        return np.arange(first, first + width)

    def _elements(self, columns: Columns, shape: tuple[int, ...], at: int) -> Terms:
        """Return terms that number the elements of a tensor with these columns."""
        tokens = torch.arange(NUM_TOKENS)[:, None]
        numbers = torch.from_numpy(columns) * NUM_TOKENS + tokens
        rest = [size for dim, size in enumerate(shape) if dim != at]
        return algebra.elements(numbers.reshape(NUM_TOKENS, *rest).movedim(0, at))

    def _shared(self, frequencies: Any) -> torch.Tensor:
        """Return one tensor for all rotations with the same frequencies, float64 [E]."""
        made = torch.from_numpy(frequencies)
        return self._frequencies.setdefault(frequencies.tobytes(), made)


def _by_token(terms: Terms) -> tuple[int, Column]:
    """Return the dimension of the tokens, and the terms of each column. Raise Unfollowed if these
    depend on the token."""
    shape = terms.terms[0].source.shape
    for at, size in enumerate(shape):
        if size == NUM_TOKENS and all(_is_of_own_token(each, at) for each in terms.terms):
            fields = [
                torch.stack([getattr(term, name) for term in terms.terms])
                for name in ("source", "coefficient", "kind", "frequency")
            ]
            fields[0] = torch.where(fields[0] == NOTHING, NOTHING, fields[0] // NUM_TOKENS)
            rows = [each.movedim(at + 1, 0).flatten(2).numpy() for each in fields]
            if all((each == each[0]).all() for each in rows):
                return at, Column(*(each[0] for each in rows))
    raise Unfollowed("tokens are mixed outside attention")


def _is_of_own_token(term: algebra.Term, at: int) -> bool:
    tokens = torch.arange(NUM_TOKENS).view(-1, *[1] * (term.source.dim() - at - 1))
    return bool(((term.source % NUM_TOKENS == tokens) | (term.source == NOTHING)).all())
