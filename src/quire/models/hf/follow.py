"""Following of a transformers model's forward pass between quire's layers (terms.py).

The pass runs on a few tokens. quire's layers compute nothing in it: each returns random numbers and
records its arguments. The terms of its result are new elements. For each torch operator between the
layers, the terms of its result are derived from the terms of its operands. Views need no rule:
terms are stored per memory and read with the tensor's strides.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.models.hf import terms as algebra
from quire.models.hf.terms import COSINE, SINE, Terms, Unfollowed

aten = torch.ops.aten

Rule = Callable[..., Terms]


class Follower(TorchDispatchMode):
    """Recorder of the terms of all tensors that depend on the tokens.

    on_sum: called with a tensor that is a sum of elements of several results, and its terms. It
        makes the sum a result of its own.
    """

    def __init__(self, on_sum: Callable[[torch.Tensor, Terms], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_sum = on_sum
        self._known: dict[int, Terms | str] = {}  # by memory; a text: why it has no terms
        self._kept: list[torch.Tensor] = []  # so that no memory is reused
        self._rules = _rules(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if any(_memory(each) in self._known for each in operands):
            self._follow(func, args, kwargs, result)
        return result

    def begin(self, tensor: torch.Tensor, terms: Terms) -> None:
        """Set the terms of a tensor [...] with memory of its own. The terms have the same shape."""
        flat = terms.map(lambda values: _laid(values, tensor))
        self._known[_memory(tensor)] = flat
        self._kept.append(tensor)

    def refuse(self, tensor: torch.Tensor, reason: str) -> None:
        """Mark a tensor [...] of any shape as having no terms, with the reason."""
        self._known[_memory(tensor)] = reason
        self._kept.append(tensor)

    def of(self, tensor: torch.Tensor) -> Terms:
        """Return the terms of a tensor [...], in the same shape. Raise Unfollowed if it has
        none."""
        known = self._known.get(_memory(tensor))
        if known is None:
            return algebra.constant(tensor)
        if isinstance(known, str):
            raise Unfollowed(known)
        layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        return known.map(lambda values: torch.as_strided(values, *layout))

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if func is aten._local_scalar_dense.default:
            raise Unfollowed("its code looks at values of a step")
        if not isinstance(result, torch.Tensor):
            for each in tree_leaves(result):
                if isinstance(each, torch.Tensor) and _memory(each) not in self._known:
                    self._forget(each, func)
            return
        if func is aten.copy_.default:
            self._overwrite(args[0], args[1])
        elif func._schema.is_mutable:
            self._forget(args[0], func)
        elif _memory(result) not in self._known:
            rule = self._rules.get(func.overloadpacket)
            if rule is None:
                return self._forget(result, func)
            try:
                made = rule(func, args, kwargs)
            except Unfollowed as reason:
                return self.refuse(result, str(reason))
            self.begin(result, made)
            if made.is_sum and len(made.terms) > 1:
                self._on_sum(result, made)

    def _overwrite(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the terms of a part of some memory by the terms of `values`."""
        layout = target.shape, target.stride(), target.storage_offset()
        size = target.untyped_storage().nbytes() // target.itemsize

        def join(parts: list[torch.Tensor]) -> torch.Tensor:
            made = parts[0].clone()
            torch.as_strided(made, *layout).copy_(parts[1])
            return made

        try:
            parts = [self.of(torch.as_strided(target, (size,), (1,), 0)), self.of(values)]
            self._known[_memory(target)] = algebra.joined(parts, join)
            self._kept.append(target)
        except Unfollowed as reason:
            self.refuse(target, str(reason))

    def _forget(self, tensor: torch.Tensor, func: Any) -> None:
        self.refuse(tensor, f"there is no operation for {func.overloadpacket}")


def _memory(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _laid(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values with the tensor's shape as a flat array in the layout of its memory."""
    size = like.untyped_storage().nbytes() // like.itemsize
    flat = torch.zeros(size, dtype=values.dtype)
    torch.as_strided(flat, like.shape, like.stride(), like.storage_offset()).copy_(values)
    return flat


def _rules(follower: Follower) -> dict[Any, Rule]:
    def of(operand: Any) -> Terms:
        if isinstance(operand, torch.Tensor):
            return follower.of(operand)
        return algebra.constant(torch.tensor(float(operand)))

    def multiply(_: Any, args: Any, __: Any) -> Terms:
        one, other = of(args[0]), of(args[1])
        if one.activation or other.activation:
            return gated(one, other)
        return algebra.multiplied(one, other)

    def gated(one: Terms, other: Terms) -> Terms:
        gate, up = (one, other) if one.activation else (other, one)
        if up.activation or not up.is_sum or len(up.terms) != 1 or len(gate.terms) != 1:
            raise Unfollowed("an activation is multiplied by something other than a layer's result")
        return Terms((*gate.terms, *up.terms), f"{gate.activation} gate")

    def divide(func: Any, args: Any, kwargs: Any) -> Terms:
        if isinstance(args[1], torch.Tensor) and args[1].dim():
            raise Unfollowed("a division by a tensor")
        return algebra.multiplied(of(args[0]), of(1.0 / float(args[1])))

    def add(_: Any, args: Any, kwargs: Any, sign: float = 1.0) -> Terms:
        other = of(args[1]).terms
        factor = sign * float(kwargs.get("alpha", 1.0))
        scaled = Terms(tuple(term.scaled(factor) for term in other), of(args[1]).activation)
        return algebra.added(of(args[0]), scaled)

    def negate(_: Any, args: Any, __: Any) -> Terms:
        return algebra.multiplied(of(args[0]), of(-1.0))

    def outer(_: Any, args: Any, __: Any) -> Terms:
        if args[0].shape[-1] != 1:
            raise Unfollowed("a product of matrices outside the layers")
        return algebra.multiplied(of(args[0]), of(args[1]))

    def move(func: Any, args: Any, kwargs: Any) -> Terms:
        if any(
            isinstance(each, torch.Tensor) and _memory(each) in follower._known for each in args[1:]
        ):
            raise Unfollowed(f"{func.overloadpacket} by values of a step")
        return of(args[0]).map(lambda values: func(values, *args[1:], **kwargs))

    def same(_: Any, args: Any, __: Any) -> Terms:
        return of(args[0])

    def join(func: Any, args: Any, kwargs: Any) -> Terms:
        parts: Sequence[Terms] = [of(each) for each in args[0]]
        return algebra.joined(parts, lambda values: func(values, *args[1:], **kwargs))

    def activate(name: str) -> Rule:
        def rule(_: Any, args: Any, kwargs: Any) -> Terms:
            own = name
            if kwargs.get("approximate", "none") == "tanh" or "tanh" in args[1:]:
                own = f"{name}_tanh"
            inner = of(args[0])
            if not inner.is_sum or len(inner.terms) != 1:
                raise Unfollowed("an activation of something other than a layer's result")
            return Terms(inner.terms, own)

        return rule

    rules: dict[Any, Rule] = {
        aten.mul: multiply, aten.div: divide, aten.add: add, aten.neg: negate,
        aten.sub: lambda func, args, kwargs: add(func, args, kwargs, -1.0),
        aten.bmm: outer, aten.mm: outer, aten.cat: join, aten.stack: join,
        aten._to_copy: same, aten.clone: same,
        aten.cos: lambda _, args, __: algebra.turned(of(args[0]), COSINE),
        aten.sin: lambda _, args, __: algebra.turned(of(args[0]), SINE),
        aten.silu: activate("silu"), aten.gelu: activate("gelu"), aten.relu: activate("relu"),
    }  # fmt: skip
    moving: Iterable[Any] = (aten.repeat, aten.index_select, aten.flip, aten.roll, aten.index)
    return rules | dict.fromkeys(moving, move)
