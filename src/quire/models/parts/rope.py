"""Compute the frequencies of a model's rotary embedding from its options (spec/rope_options.py).

Shape legend: T tokens, H head dim, E = H / 2, A axes of positions.

Frequencies are radians per token; a dimension that is not rotated has frequency 0. The variant
`divisors` comes from GGUF files, which hold a divisor for each frequency instead of a rule.
"""

import math
from collections.abc import Sequence

import torch

from quire.models.parts.layers import ParamFactory
from quire.ops.rotary import rotary_rows
from quire.spec.rope_options import RopeOptions


class Rotary:
    """The model's rotary embedding, called once per step. All layers share the result."""

    def __init__(self, options: RopeOptions, head_dim: int, factory: ParamFactory) -> None:
        frequencies_E = rope_frequencies(options, head_dim)
        if options.axes:
            frequencies_E = by_axis(frequencies_E, options.axes)
        self._frequencies_E = frequencies_E.to(factory.device)
        self._scale, self._dtype = options.scale, factory.dtype

    def __call__(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the factors of these positions for ops.rotary. positions: [T], or [A, T] with
        M-RoPE."""
        return rotary_rows(positions_T, self._frequencies_E, self._scale, self._dtype)


def rope_frequencies(options: RopeOptions, head_dim: int) -> torch.Tensor:
    """Return the frequency of each pair of dimensions, float64 [E]."""
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
    """Return the order of a head's dimensions, int64 [H], in which a rotation of halves rotates the
    checkpoint's pairs; None for the checkpoint's order. Dot products of heads do not change.

    rotated: number of first dimensions that are rotated; the others stay as they are. interleaved:
    whether pairs are (0, 1), (2, 3), ... instead of (0, rotated / 2), (1, rotated / 2 + 1), ...
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
    """Return the row order of a projection, int64 [N * H], with the same order in each head."""
    if order_H is None:
        return None
    first_N1 = torch.arange(num_heads)[:, None] * len(order_H)
    return (first_N1 + order_H).flatten()


def fused_rows(
    orders: Sequence[torch.Tensor | None], sizes: Sequence[int], head_dim: int, *, by_head: bool
) -> torch.Tensor | None:
    """Return the row order of a fused projection, int64 [sum of sizes]; None if it is unchanged.
    Queries come first, then keys, then values.

    orders, sizes: row order and number of rows of each. by_head: whether the checkpoint groups rows
    as [heads, 3, H] instead; then all sizes are equal.
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
    """Divide low frequencies by `factor`, keep high ones, and blend in between; [E] to [E]."""
    turns_E = options.trained * frequencies_E / (2 * math.pi)
    low, high = options.low_turns, options.high_turns
    keep_E = ((turns_E - low) / (high - low)).clamp(0.0, 1.0)
    return keep_E * frequencies_E + (1 - keep_E) * frequencies_E / options.factor


def _yarn(frequencies_E: torch.Tensor, options: RopeOptions) -> torch.Tensor:
    """Blend as llama3 does, but by the index of a frequency instead of its value; [E] to [E]."""

    def index_of(turns: float) -> float:
        """Return the index of the frequency with this number of turns in `trained` tokens."""
        log_ratio = math.log(options.trained / (turns * 2 * math.pi))
        return len(frequencies_E) * log_ratio / math.log(options.theta)

    first, last = index_of(options.high_turns), index_of(options.low_turns)
    if options.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies_E) - 1)
    width = last - first if last != first else 0.001  # as in transformers, even if negative
    index_E = torch.arange(len(frequencies_E), dtype=torch.float64)
    keep_E = 1 - ((index_E - first) / width).clamp(0.0, 1.0)
    return keep_E * frequencies_E + (1 - keep_E) * frequencies_E / options.factor
