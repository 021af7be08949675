"""Paired comparisons: right or wrong answers, costs of tokens, and next-token distributions.

Shape legend: I items, T tokens, P positions, V vocabulary.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Z_95 = 1.959964  # the normal distribution's 97.5 % point

Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class PairedAccuracy:
    """The same items answered twice. lost: right before, wrong after; gained: the reverse.

    error: the standard error of their mean difference, items that ask the same taken together.
    """

    num_items: int
    num_right: int
    lost: int
    gained: int
    error: float = 0.0

    @classmethod
    def of(cls, before_I: Bools, after_I: Bools, keys: Sequence[str]) -> "PairedAccuracy":
        """Count the pairs of two results [I]. keys: each item's question. Raises ValueError if the
        lengths differ."""
        if not len(before_I) == len(after_I) == len(keys):
            raise ValueError(f"{len(before_I)} and {len(after_I)} items are no pairs.")
        lost, gained = (before_I & ~after_I).sum(), (after_I & ~before_I).sum()
        groups: dict[str, list[int]] = defaultdict(list)
        for before, after, key in zip(before_I, after_I, keys, strict=True):
            groups[key].append(int(after) - int(before))
        error = mean_and_error([np.array(group) for group in groups.values()])[1]
        return cls(len(after_I), int(after_I.sum()), int(lost), int(gained), error)

    @property
    def points(self) -> float:
        """Percentage points gained; negative if some were lost."""
        return 100 * (self.gained - self.lost) / self.num_items

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % interval of `points`.

        It is Wald's with half an item more in each of the four cells (Agresti and Min, 2005). So it
        keeps a width if no item differs. It is wider if items with the same question differ
        together.
        """
        count = self.num_items + 2
        mean = (self.gained - self.lost) / count
        variance = (self.gained + self.lost + 1) / count - mean**2
        half = Z_95 * max(math.sqrt(variance / count), self.error)
        return 100 * (mean - half), 100 * (mean + half)

    @property
    def p_value(self) -> float:
        """McNemar's exact test, two-sided, of independent items."""
        differing = self.lost + self.gained
        tail = sum(math.comb(differing, i) for i in range(min(self.lost, self.gained) + 1))
        p_value: float = 2 * tail / 2**differing
        return min(1.0, p_value)

    def figures(self) -> dict[str, Any]:
        return {
            "items": self.num_items,
            "accuracy": self.num_right / self.num_items,
            "points": self.points,
            "interval": self.interval,
            "lost": self.lost,
            "gained": self.gained,
            "p_value": self.p_value,
        }


def mean_and_error(texts: Sequence[npt.NDArray[Any]]) -> tuple[float, float]:
    """Mean over all tokens, and its standard error. texts: one array [T] each.

    Tokens of one text are not independent, so it is the texts that count as drawn at random. The
    error is infinite for a single text.
    """
    sums, counts = np.array([text.sum() for text in texts]), np.array([len(t) for t in texts])
    mean = sums.sum() / counts.sum()
    if len(texts) < 2:
        return float(mean), math.inf
    spread = np.square(sums - mean * counts).sum() * len(texts) / (len(texts) - 1)
    return float(mean), float(np.sqrt(spread) / counts.sum())


def centred(logprobs_PV: Floats) -> npt.NDArray[np.float64]:
    """Return logits with mean 0 from log-probabilities [P, V], which differ by a constant."""
    wide_PV = logprobs_PV.astype(np.float64)
    centred_PV: npt.NDArray[np.float64] = wide_PV - wide_PV.mean(-1, keepdims=True)
    return centred_PV


@dataclass
class LogitError:
    """The distance of next-token distributions from a reference's, text by text."""

    num_positions: int = 0
    num_logits: int = 0
    num_agreeing: int = 0
    absolute: float = 0.0
    largest: float = 0.0
    squared: float = 0.0
    reference_squared: float = 0.0
    divergences: list[Floats] = field(default_factory=list)

    def add(self, reference_PV: Floats, other_PV: Floats) -> None:
        """Add log-probabilities [P, V] at the same positions of a text."""
        reference_logits_PV = centred(reference_PV)
        error_PV = np.abs(centred(other_PV) - reference_logits_PV)
        self.num_positions += len(error_PV)
        self.num_logits += error_PV.size
        self.num_agreeing += int((reference_PV.argmax(-1) == other_PV.argmax(-1)).sum())
        self.absolute += float(error_PV.sum())
        self.largest = max(self.largest, float(error_PV.max()))
        self.squared += float(np.square(error_PV).sum())
        self.reference_squared += float(np.square(reference_logits_PV).sum())
        wide_PV = reference_PV.astype(np.float64)
        self.divergences.append((np.exp(wide_PV) * (wide_PV - other_PV)).sum(-1))

    def figures(self) -> dict[str, Any]:
        """Return the figures. divergence: Kullback-Leibler's, from the reference, in nats."""
        divergence, error = mean_and_error(self.divergences)
        return {
            "positions": self.num_positions,
            "mean_absolute": self.absolute / self.num_logits,
            "largest_absolute": self.largest,
            "relative": math.sqrt(self.squared / self.reference_squared),
            "divergence": divergence,
            "divergence_error": error,
            "largest_divergence": float(max(text.max() for text in self.divergences)),
            "same_best_token": self.num_agreeing / self.num_positions,
        }
