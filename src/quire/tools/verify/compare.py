"""Compare two traces: their distance, the point where it starts, and its effect on greedy tokens.

Shape legend: L tokens of the sequence, D any dimension, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.tools.verify.watch import LOGITS, Trace

# Bounds on rounding, relative to the values' size. In float64 a wrong option always exceeds it. In
# 16 bits it covers the sum of many layers' rounding.
BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 2e-4,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}
LOSSY = 0.15  # bound for integer products, and for keys and values in 8 bits
INT8_EPS = 1 / 127


@dataclass(frozen=True)
class Difference:
    """The difference at one point, over all positions."""

    point: str
    relative: float  # norm of the error over norm of the values
    median: float  # median of single tokens' relative errors
    units: float  # `relative` in units of the rounding: the dtype's, or that of 8 bits
    largest: float  # largest error of a single value
    position: int | None  # first token whose relative error exceeds the bound; None if none does


@dataclass(frozen=True)
class TokensChosen:
    """The greedy tokens of both sides at each place after the prompt, given the same context."""

    count: int
    same: int  # places with equal tokens
    position: int | None = None  # first place after the prompt with different tokens
    margin: float = 0.0  # there: transformers' logit of its token minus that of quire's token
    error: float = 0.0  # there: largest difference between the two sides' logits

    @property
    def is_tie(self) -> bool:
        """Return whether the first difference is a near tie, which the error explains."""
        return self.position is not None and self.margin <= 2 * self.error


def differences(got: Trace, other: Trace, dtype: torch.dtype, bound: float) -> list[Difference]:
    """Compare the points that both traces have, in the order in which the model computes them.

    bound: the dtype's bound, or LOSSY. Raises ValueError for a point of different shapes, as the
    traces then belong to different models.
    """
    found = []
    for point, values in other.items():
        if point in got:
            if got[point].shape != values.shape:
                shapes = f"{list(got[point].shape)} and {list(values.shape)}"
                raise ValueError(f"{point} has the shapes {shapes}")
            eps = INT8_EPS if bound == LOSSY else torch.finfo(dtype).eps
            found.append(_difference(point, got[point], values, eps, bound))
    return found


def _difference(
    point: str, got: torch.Tensor, expected: torch.Tensor, eps: float, bound: float
) -> Difference:
    exact = expected.double()
    error_LD = got.double() - exact
    size = exact.norm().item()
    relative = error_LD.norm().item() / size if size else error_LD.norm().item()
    sizes_L = exact.norm(dim=1).clamp(min=size / len(exact) ** 0.5)
    errors_L = error_LD.norm(dim=1)
    beyond_L = ~(errors_L <= bound * sizes_L)  # in this form NaN counts as beyond
    position = int(beyond_L.nonzero()[0]) if beyond_L.any() else None
    median, largest = (errors_L / sizes_L).median().item(), error_LD.abs().max().item()
    return Difference(point, relative, median, relative / eps, largest, position)


def tokens_chosen(got: Trace, other: Trace, tokens: Sequence[int], prompt: int) -> TokensChosen:
    """Compare both sides' greedy tokens at each place after the prompt, given the same tokens."""
    places = slice(prompt - 1, len(tokens) - 1)
    ours_LV, theirs_LV = got[LOGITS][places].double(), other[LOGITS][places].double()
    ours, theirs = ours_LV.argmax(-1), theirs_LV.argmax(-1)
    same = int((ours == theirs).sum())
    if same == len(ours):
        return TokensChosen(len(ours), same)
    first = int((ours != theirs).nonzero()[0])
    margin = theirs_LV[first, theirs[first]] - theirs_LV[first, ours[first]]
    error = (ours_LV[first] - theirs_LV[first]).abs().max()
    return TokensChosen(len(ours), same, first, margin.item(), error.item())
