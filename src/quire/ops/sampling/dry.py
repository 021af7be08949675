"""DRY ("don't repeat yourself"): penalise tokens that would continue a repeated sequence, the more
the longer it is.

As in llama.cpp and text-generation-webui: suppose the last n tokens also occur earlier in the text,
with n at least allowed_length. The token that followed them there loses multiplier * base ** (n -
allowed_length). Matches end at a token that breaks sequences, and such tokens are not penalised.

It runs on the host: tokens in, few penalties out. Shape legend: M tokens of the text, P penalised
tokens.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
LARGEST_LOG = 88.7228391  # of a float32, as in llama.cpp


@dataclass(frozen=True)
class Dry:
    """Parameters of DRY. last_n: how many of the last tokens are searched, -1 for all. breakers:
    token ids that end matches."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int
    breakers: Int32

    @property
    def largest_exponent(self) -> int:
        """Exponent at which the power stops growing, so that it stays a float32; 0 for a base of
        1."""
        return int(LARGEST_LOG / math.log(self.base)) if self.base > 1.000001 else 0


def dry_penalties(
    tokens_M: Int32, dry: Dry
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return penalised tokens, int64 [P], each once, and what their logits lose, float32 [P]."""
    ids_P, lengths_P = longest_matches(tokens_M, dry)
    exponents_P = np.minimum(lengths_P - dry.allowed_length, dry.largest_exponent)
    with np.errstate(over="ignore"):
        return ids_P, (dry.multiplier * dry.base ** exponents_P.astype(np.float64)).astype(
            np.float32
        )


def longest_matches(
    tokens_M: Int32, dry: Dry
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the tokens [P] that would continue a repetition of at least allowed_length, and its
    length [P], up to where the penalty stops growing."""
    text = tokens_M if dry.last_n < 0 else tokens_M[max(len(tokens_M) - dry.last_n, 0) :]
    nothing = np.empty(0, np.int64)
    if len(text) <= dry.allowed_length:
        return nothing, nothing
    is_breaker = np.isin(text, dry.breakers)
    breakers = np.flatnonzero(is_breaker)
    limit = len(text) - 1 - int(breakers[-1]) if len(breakers) else len(text)
    if limit < dry.allowed_length:
        return nothing, nothing
    ends = np.flatnonzero(text[:-1] == text[-1])
    ends = ends[~is_breaker[ends + 1]]
    lengths, alive = np.ones(len(ends), np.int64), np.arange(len(ends))
    for length in range(1, min(limit, dry.allowed_length + dry.largest_exponent)):
        at = ends[alive] - length
        alive = alive[(at >= 0) & (text[at] == text[len(text) - 1 - length])]
        if len(alive) == 0:
            break
        lengths[alive] += 1
    ids_P, which = np.unique(text[ends + 1], return_inverse=True)
    longest_P = np.zeros(len(ids_P), np.int64)
    np.maximum.at(longest_P, which, lengths)
    is_long = longest_P >= dry.allowed_length
    return ids_P[is_long].astype(np.int64), longest_P[is_long]
