"""Composition of a tensor of a forward pass, element by element.

Each element is a sum of terms. A term is a product: a coefficient, an element of a layer's result
(or nothing), and a factor. The factor is 1, the cosine or sine of an angle proportional to the
token's position, or that angle itself. Between layers, transformers' code rotates, slices, joins
and adds tensors. All of these keep this form: the terms of a result follow from the terms of the
operands by the same operator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

NOTHING = -1  # in place of an element of a layer's result
ONE, COSINE, SINE, ANGLE = range(4)


@dataclass(frozen=True)
class Term:
    """One term of each element of a tensor. All fields have the tensor's shape.

    source: int64, an element of a layer's result, or NOTHING. coefficient: float64. kind: int64,
    the factor: ONE, COSINE, SINE or ANGLE. frequency: float64, of the angle, in radians per token.
    """

    source: torch.Tensor
    coefficient: torch.Tensor
    kind: torch.Tensor
    frequency: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Term":
        """Return a term with rearranged elements. The function only copies."""
        return Term(*map(function, self.fields()))

    def fields(self) -> tuple[torch.Tensor, ...]:
        return self.source, self.coefficient, self.kind, self.frequency

    def scaled(self, factor: torch.Tensor | float) -> "Term":
        return Term(self.source, self.coefficient * factor, self.kind, self.frequency)


@dataclass(frozen=True)
class Terms:
    """Terms of a tensor. activation: name of a function applied to their sum; empty for none."""

    terms: tuple[Term, ...]
    activation: str = ""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Terms":
        return Terms(tuple(term.map(function) for term in self.terms), self.activation)

    @property
    def is_sum(self) -> bool:
        """Whether it is a plain sum of elements of results, which may be scaled."""
        return not self.activation and all(
            bool(((term.kind == ONE) & (term.source != NOTHING)).all()) for term in self.terms
        )


class Unfollowed(Exception):
    """Error for a computation whose result does not have the form of `Terms`."""


def elements(source: torch.Tensor) -> Terms:
    """Return the terms of unchanged elements of results. source: int64 [...], their numbers."""
    zeros = torch.zeros(source.shape, dtype=torch.float64)
    return Terms((Term(source, zeros + 1, torch.zeros_like(source), zeros),))


def constant(values: torch.Tensor) -> Terms:
    """Return the terms of numbers [...] that do not depend on the tokens."""
    values = values.to(torch.float64)
    zeros = torch.zeros_like(values)
    none = torch.full(values.shape, NOTHING)
    return Terms((Term(none, values, torch.zeros_like(none), zeros),))


def angles(like: torch.Tensor) -> Terms:
    """Return the terms of token positions, in the shape [...] of `like`."""
    ones = torch.ones(like.shape, dtype=torch.float64)
    none = torch.full(like.shape, NOTHING)
    return Terms((Term(none, ones, torch.full_like(none, ANGLE), ones),))


def added(one: Terms, other: Terms) -> Terms:
    if one.activation or other.activation:
        raise Unfollowed("an activation is added to something")
    shape = torch.broadcast_shapes(one.terms[0].source.shape, other.terms[0].source.shape)
    return Terms((*one.terms, *other.terms)).map(lambda values: values.expand(shape))


def multiplied(one: Terms, other: Terms) -> Terms:
    if one.activation or other.activation:
        raise Unfollowed("an activation is multiplied by something")
    return Terms(tuple(_product(a, b) for a in one.terms for b in other.terms))


def _product(one: Term, other: Term) -> Term:
    """Return the product of two terms. In each element, at most one factor may come from a result,
    and at most one from an angle."""
    pairs = [
        torch.broadcast_tensors(*pair) for pair in zip(one.fields(), other.fields(), strict=True)
    ]
    (s, t), (a, b), (k, m), (f, g) = pairs
    is_zero = (a == 0) | (b == 0)
    if bool((((s != NOTHING) & (t != NOTHING)) | ((k != ONE) & (m != ONE)))[~is_zero].any()):
        raise Unfollowed("results of layers are multiplied with each other")
    coefficient = a * b
    # A factor of an angle scales its frequency. Otherwise it scales the coefficient.
    is_angle = (k + m) == ANGLE
    frequency = torch.where(is_angle, (f + g) * coefficient, f + g)
    coefficient = torch.where(is_angle, torch.ones_like(coefficient), coefficient)
    return Term(torch.maximum(s, t), coefficient, k + m, frequency)


def turned(terms: Terms, kind: int) -> Terms:
    """Return the cosine or sine of angles. kind: COSINE or SINE."""
    [term] = terms.terms if len(terms.terms) == 1 else [None]
    is_angle = term is not None and bool(((term.kind == ANGLE) & (term.source == NOTHING)).all())
    if term is None or terms.activation or not is_angle:
        raise Unfollowed("sines of something other than positions")
    ones = torch.ones_like(term.coefficient)
    return Terms((Term(term.source, ones, torch.full_like(term.kind, kind), term.frequency),))


def joined(parts: Sequence[Terms], join: Callable[[list[torch.Tensor]], torch.Tensor]) -> Terms:
    """Return the terms of tensors combined by a function that only copies."""
    if any(part.activation for part in parts):
        raise Unfollowed("activations are joined")
    count = max(len(part.terms) for part in parts)
    filled = [[*part.terms, *[_zero(part)] * (count - len(part.terms))] for part in parts]
    terms = []
    for each in zip(*filled, strict=True):
        fields = zip(*(term.fields() for term in each), strict=True)
        terms.append(Term(*(join(list(values)) for values in fields)))
    return Terms(tuple(terms))


def _zero(part: Terms) -> Term:
    first = part.terms[0]
    none = torch.full_like(first.source, NOTHING)
    zeros = torch.zeros_like(first.coefficient)
    return Term(none, zeros, torch.zeros_like(none), zeros)
