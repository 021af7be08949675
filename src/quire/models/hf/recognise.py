"""Recognition of the function that a transformers module computes, whatever its class.

Norms and activations have many class names and few meanings. So a module is called with a few
numbers and compared to the candidates. A rotary embedding is recognised by the terms of a tensor.

Shape legend: W columns, N heads, H head dim, E = H / 2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from quire.models.hf.terms import COSINE, ONE, SINE, Unfollowed
from quire.ops.elementwise import gelu_tanh
from quire.ops.norms import layer_norm, rms_norm

USUAL_EPS = (1e-5, 1e-6, 1e-12)  # for modules without an attribute for it


@dataclass(frozen=True)
class Norm:
    """Recognised norm. is_rms: RMS or layer normalisation. offset: added to the weight. parts:
    names of its parameters."""

    is_rms: bool
    size: int
    eps: float
    offset: float
    parts: tuple[str, ...]


@torch.no_grad()
def norm_of(module: nn.Module) -> Norm | None:
    """Return the norm that a module computes, or None."""
    parts = {name: each.shape for name, each in module.named_parameters()}
    shape = parts.get("weight", getattr(module, "normalized_shape", None))
    is_leaf = not list(module.children()) and not list(module.buffers())
    if "norm" not in type(module).__name__.lower() or not is_leaf or not set(parts) <= {
        "weight", "bias",
    } or shape is None or len(shape) != 1:  # fmt: skip
        return None
    size = int(shape[0])
    random = torch.Generator().manual_seed(0)
    given = {name: torch.rand(size, generator=random) + 0.5 for name in parts}
    x_TD = torch.randn(3, size, generator=random) * torch.tensor([[1.0], [1e-3], [30.0]])
    x_TD[0] += 0.5
    try:
        expected = torch.func.functional_call(module, given, (x_TD,))
    except Exception:  # it has another signature
        return None
    for norm in _candidates(module, size, tuple(parts)):
        if isinstance(expected, torch.Tensor) and torch.allclose(
            _computed(norm, x_TD, given), expected, 1e-5, 1e-6
        ):
            return norm
    return None


def _candidates(module: nn.Module, size: int, parts: tuple[str, ...]) -> Iterator[Norm]:
    own = [each for each in vars(module).values() if isinstance(each, float)]
    for eps in (*own, *USUAL_EPS):
        if parts == ("weight",):
            yield Norm(True, size, eps, 0.0, parts)
            yield Norm(True, size, eps, 1.0, parts)
        yield Norm(False, size, eps, 0.0, parts)


def _computed(norm: Norm, x_TD: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    if norm.is_rms:
        return rms_norm(x_TD, given["weight"] + norm.offset, norm.eps)
    return layer_norm(x_TD, given.get("weight"), given.get("bias"), norm.eps)


@torch.no_grad()
def is_gelu_by_tanh(module: nn.Module) -> bool:
    """Return whether a module computes the tanh approximation of GELU with its own code."""
    if "GELU" not in type(module).__name__ or list(module.parameters()) or type(module) is nn.GELU:
        return False
    x = torch.linspace(-6.0, 6.0, 97)
    try:
        return torch.allclose(module(x), gelu_tanh(x), 1e-5, 1e-6)
    except Exception:  # it has another signature
        return False


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Column:
    """Terms of a tensor's columns (terms.py). Each field is [terms, W]; source numbers the columns
    of all results."""

    source: Ints
    coefficient: Floats
    kind: Ints
    frequency: Floats


@dataclass(frozen=True)
class Rotation:
    """Half-rotation of heads whose dimensions are reordered.

    columns: int64 [N * H], the columns to read. order: int64 [H], dimension in the class of each
    dimension that is read. frequencies: float64 [E], 0 for dimensions that are not rotated. scale:
    factor of sines and cosines.
    """

    columns: Ints
    order: Ints
    frequencies: Floats
    scale: float


def rotation(terms: Column, num_heads: int) -> Rotation:
    """Return the rotation with these terms. Raise Unfollowed if they are anything else."""
    turned, read, partner, sign, frequency, scale = _pairs(terms)
    size = len(read) // num_heads
    by_head = [
        each.reshape(num_heads, size)
        for each in (turned, partner - np.arange(len(read)), sign, frequency)
    ]
    if any((each != each[0]).any() for each in by_head):
        raise Unfollowed("heads are rotated in different ways")
    turned, partner, sign, frequency = (each[0] for each in by_head)
    partner = partner + np.arange(size)
    firsts = np.flatnonzero(turned & (sign < 0))
    seconds, rest = partner[firsts], np.flatnonzero(~turned)
    middle = len(rest) // 2
    order = np.concatenate((firsts, rest[:middle], seconds, rest[middle:]))
    if size % 2 or len(rest) % 2 or len(set(order.tolist())) != size:
        raise Unfollowed("the rotated dimensions are not pairs of a head")
    frequencies = np.concatenate((frequency[firsts], np.zeros(middle)))
    columns = read.reshape(num_heads, size)[:, order].reshape(-1)
    return Rotation(columns, order, frequencies, scale)


def _pairs(terms: Column) -> tuple[npt.NDArray[np.bool_], Ints, Ints, Ints, Floats, float]:
    """Return five arrays [W] and the common scale. Arrays: whether the column is rotated, the
    column that it reads, its partner's position, the sign of the partner's share, and the
    frequency."""
    live = terms.coefficient != 0
    cosine, plain, sine = (live & (terms.kind == each) for each in (COSINE, ONE, SINE))
    turned = cosine.any(axis=0)
    counts = (cosine | plain).sum(axis=0), sine.sum(axis=0), live.sum(axis=0)
    if (counts[0] != 1).any() or (counts[1] != turned).any() or (counts[2] != 1 + turned).any():
        raise Unfollowed("the input of a rotation is a sum of something else")

    def of(mask: npt.NDArray[np.bool_], values: Ints | Floats) -> npt.NDArray[Any]:
        return np.asarray(np.where(mask, values, 0).sum(axis=0))

    read, other = of(cosine | plain, terms.source), of(sine, terms.source)
    sines, cosines = of(sine, terms.coefficient), of(cosine, terms.coefficient)
    frequency = of(cosine, terms.frequency)
    scale = float(cosines[turned][0])
    positions = {int(column): position for position, column in enumerate(read)}
    partner = np.arange(len(read))
    partner[turned] = [positions.get(int(column), -1) for column in other[turned]]
    agrees = (
        np.allclose(cosines[turned], scale)
        and np.allclose(np.abs(sines[turned]), scale)
        and np.allclose(of(plain, terms.coefficient)[~turned], 1.0)
        and (partner >= 0).all()
        and (partner[partner] == np.arange(len(read))).all()
        and np.array_equal(frequency, np.where(turned, of(sine, terms.frequency), 0.0))
        and np.array_equal(frequency, frequency[partner])
    )
    sign = np.sign(sines).astype(np.int64)
    if not agrees or (sign[turned] != -sign[partner[turned]]).any():
        raise Unfollowed("sines and cosines are combined in another way than a rotation")
    return turned, read, partner, sign, frequency, scale
