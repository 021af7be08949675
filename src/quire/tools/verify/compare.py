"""How far two traces are apart, where that begins, and what it does to the tokens chosen.

Shape legend: L tokens of the sequence, D any dimension, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.tools.verify.watch import LOGITS, Trace

# What rounding may come to, relative to the values' size. Of float64 it is what a wrong option
# never stays below; of 16 bits what many layers add up to.
BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 2e-4,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}
LOSSY = 0.15  # what products in integers, and keys and values in 8 bits, may come to
INT8_EPS = 1 / 127


@dataclass(frozen=True)
class Difference:
    """Of one point, over all positions.

    relative: the error's norm over the values'. units: the same in units of what the dtype rounds,
    or 8 bits do where these are what differs.
    median: of the relative errors of single tokens. largest: of the errors of single values.
    position: the first token whose own relative error exceeds the bound; None where none does.
    """

    point: str
    relative: float
    median: float
    units: float
    largest: float
    position: int | None


@dataclass(frozen=True)
class TokensChosen:
    """Tokens that are chosen greedily after the prompt and what was chosen before, here and there.

    same: how many are. position: of the first that differs, among those after the prompt; then
    margin is by how much their logit is above that of ours, there, and error the largest difference
    of the logits at that place.
    """

    count: int
    same: int
    position: int | None = None
    margin: float = 0.0
    error: float = 0.0

    @property
    def is_tie(self) -> bool:
        """Return whether the first that differs was so near that the error explains it."""
        return self.position is not None and self.margin <= 2 * self.error


def differences(got: Trace, wanted: Trace, dtype: torch.dtype, bound: float) -> list[Difference]:
    """Compare the points that both have, in the order in which the model computes them. bound: that
    of the dtype, or LOSSY.

    Raises ValueError for a point of another shape: the traces are not of one model.
    """
    found = []
    for point, values in wanted.items():
        if point in got:
            if got[point].shape != values.shape:
                shapes = f"{list(got[point].shape)} and {list(values.shape)}"
                raise ValueError(f"{point} has the shapes {shapes}")
            eps = INT8_EPS if bound == LOSSY else torch.finfo(dtype).eps
            found.append(_difference(point, got[point], values, eps, bound))
    return found


def _difference(
    point: str, got: torch.Tensor, wanted: torch.Tensor, eps: float, bound: float
) -> Difference:
    exact = wanted.double()
    error_LD = got.double() - exact
    size = exact.norm().item()
    relative = error_LD.norm().item() / size if size else error_LD.norm().item()
    sizes_L = exact.norm(dim=1).clamp(min=size / len(exact) ** 0.5)
    errors_L = error_LD.norm(dim=1)
    beyond_L = ~(errors_L <= bound * sizes_L)  # in this form, which takes NaN for beyond it
    position = int(beyond_L.nonzero()[0]) if beyond_L.any() else None
    median, largest = (errors_L / sizes_L).median().item(), error_LD.abs().max().item()
    return Difference(point, relative, median, relative / eps, largest, position)


def tokens_chosen(got: Trace, wanted: Trace, tokens: Sequence[int], prompt: int) -> TokensChosen:
    """Compare what each side chooses at every place after the prompt, given the same tokens."""
    places = slice(prompt - 1, len(tokens) - 1)
    ours_LV, theirs_LV = got[LOGITS][places].double(), wanted[LOGITS][places].double()
    ours, theirs = ours_LV.argmax(-1), theirs_LV.argmax(-1)
    same = int((ours == theirs).sum())
    if same == len(ours):
        return TokensChosen(len(ours), same)
    first = int((ours != theirs).nonzero()[0])
    margin = theirs_LV[first, theirs[first]] - theirs_LV[first, ours[first]]
    error = (ours_LV[first] - theirs_LV[first]).abs().max()
    return TokensChosen(len(ours), same, first, margin.item(), error.item())
