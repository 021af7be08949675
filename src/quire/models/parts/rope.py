"""Rotary embedding of a model: its frequencies, from what the config says (spec/rope_options.py).

Shape legend: T tokens, H head dim, E = H / 2, A axes of positions.

Frequencies are radians per token; a dimension that is not turned has frequency 0. The variant
`divisors` comes from GGUF files, which hold a number for each frequency instead of the rule that
gives them.
"""

import math
from collections.abc import Sequence

import torch

from quire.models.parts.layers import ParamFactory
from quire.ops.rotary import rotary_rows
from quire.spec.rope_options import RopeOptions


class Rotary:
    """The model's rotary embedding. Called once per step; all layers share what it returns."""

    def __init__(self, options: RopeOptions, head_dim: int, factory: ParamFactory) -> None:
        frequencies_E = rope_frequencies(options, head_dim)
        if options.axes:
            frequencies_E = by_axis(frequencies_E, options.axes)
        self._frequencies_E = frequencies_E.to(factory.device)
        self._scale, self._dtype = options.scale, factory.dtype

    def __call__(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the factors of these positions, as ops.rotary takes them. positions: of M-RoPE
        [A, T], or [T] where they are the same in all axes."""
        return rotary_rows(positions_T, self._frequencies_E, self._scale, self._dtype)


def rope_frequencies(options: RopeOptions, head_dim: int) -> torch.Tensor:
    """[E] in float64."""
    turned_E = _turned(options)
    frequencies_E = torch.zeros(head_dim // 2, dtype=torch.float64)
    frequencies_E[: len(turned_E)] = turned_E
    return frequencies_E


def by_axis(frequencies_E: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """Return frequencies [A, E] that are 0 in all axes but their own (M-RoPE, arXiv 2409.12191)."""
    own_E = torch.tensor(axes)
    is_own_AE = torch.arange(int(own_E.max()) + 1)[:, None] == own_E
    return torch.where(is_own_AE, frequencies_E, 0.0)


def head_order(head_dim: int, rotated: int, *, interleaved: bool) -> torch.Tensor | None:
    """Order the dimensions of a head, int64 [H], so that a rotation of halves turns the pairs that
    the checkpoint means; None where they stand so. What a head's dot products are does not change.

    rotated: the first dimensions, which are turned; the others stay as they are. interleaved: pairs
    are (0, 1), (2, 3), ... instead of (0, rotated / 2), (1, rotated / 2 + 1), ...
    """
    if rotated == head_dim and not interleaved:
        return None
    turned = torch.arange(rotated)
    first = turned[::2] if interleaved else turned[: rotated // 2]
    second = turned[1::2] if interleaved else turned[rotated // 2 :]
    others = torch.arange(rotated, head_dim)
    middle = len(others) // 2
    return torch.cat((first, others[:middle], second, others[middle:]))


def rows_of_heads(order_H: torch.Tensor | None, num_heads: int) -> torch.Tensor | None:
    """Order the rows of a projection to so many heads, int64 [N * H], each in the same order."""
    if order_H is None:
        return None
    first_N1 = torch.arange(num_heads)[:, None] * len(order_H)
    return (first_N1 + order_H).flatten()


def fused_rows(
    orders: Sequence[torch.Tensor | None], sizes: Sequence[int], head_dim: int, *, by_head: bool
) -> torch.Tensor | None:
    """Order the rows of one projection to queries, keys and values, int64; None: as they are.

    orders, sizes: of the three. by_head: whether the checkpoint has them as [heads, 3, H] instead
    of one after the other; then they are of one size.
    """
    if not by_head and all(order is None for order in orders):
        return None
    rows = torch.arange(sum(sizes))
    if by_head:
        rows = rows.view(-1, 3, head_dim).transpose(0, 1).flatten()
    parts = zip(rows.split(list(sizes)), orders, strict=True)
    return torch.cat([part if order is None else part[order] for part, order in parts])


def _turned(options: RopeOptions) -> torch.Tensor:
    half = options.rotated // 2
    exponents_E = torch.arange(half, dtype=torch.float64) / half
    frequencies_E = options.theta**-exponents_E
    if options.kind == "linear":
        return frequencies_E / options.factor
    if options.kind == "divisors":
        return frequencies_E / torch.tensor(options.divisors, dtype=torch.float64)
    if options.kind == "llama3":
        return _llama3(frequencies_E, options)
    if options.kind == "yarn":
        return _yarn(frequencies_E, options)
    return frequencies_E


def _llama3(frequencies_E: torch.Tensor, options: RopeOptions) -> torch.Tensor:
    """Slow turns are slowed by `factor`, fast ones kept, those between are blended."""
    turns_E = options.trained * frequencies_E / (2 * math.pi)
    low, high = options.low_turns, options.high_turns
    keep_E = ((turns_E - low) / (high - low)).clamp(0.0, 1.0)
    return keep_E * frequencies_E + (1 - keep_E) * frequencies_E / options.factor


def _yarn(frequencies_E: torch.Tensor, options: RopeOptions) -> torch.Tensor:
    """Blend as llama3 does, but along the index of the frequency instead of its value."""

    def index_of(turns: float) -> float:
        """Find the place of the frequency that makes so many turns in `trained` tokens."""
        wanted = math.log(options.trained / (turns * 2 * math.pi))
        return len(frequencies_E) * wanted / math.log(options.theta)

    first, last = index_of(options.high_turns), index_of(options.low_turns)
    if options.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies_E) - 1)
    width = last - first if last != first else 0.001  # as transformers, also where it is below 0
    index_E = torch.arange(len(frequencies_E), dtype=torch.float64)
    keep_E = 1 - ((index_E - first) / width).clamp(0.0, 1.0)
    return keep_E * frequencies_E + (1 - keep_E) * frequencies_E / options.factor
