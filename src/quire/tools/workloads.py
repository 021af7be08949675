"""Workloads of the benchmarks: lengths as in public data sets, prompts of random tokens.

Lengths are clipped log-normals. Their mean after clipping is the data set's mean in the paper (P
fig. 11). The paper omits the spread: `sigma` is an estimate from its histograms. All random numbers
come from the given seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
FIRST_WORD = 3  # smallest token id in a prompt made of named parts
SMALLEST_VOCABULARY = 16


@dataclass(frozen=True)
class Lengths:
    """A log-normal of tokens with spread `sigma`, clipped to [low, high]; `mean` is after that."""

    mean: float
    sigma: float
    low: int
    high: int

    def sample(self, num: int, rng: np.random.Generator) -> Int64:
        """Draw lengths in tokens, int64 [num]."""
        drawn = rng.lognormal(self.mu, self.sigma, num)
        return np.rint(np.clip(drawn, self.low, self.high)).astype(np.int64)

    @property
    def mu(self) -> float:
        """Return the logarithm's mean before clipping, by bisection: the clipped mean increases
        with it."""
        low, high = math.log(self.low), math.log(self.high)
        for _ in range(60):
            middle = (low + high) / 2
            if self._clipped_mean(middle) < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _clipped_mean(self, mu: float) -> float:
        below = (math.log(self.low) - mu) / self.sigma
        above = (math.log(self.high) - mu) / self.sigma
        inside = _normal(above - self.sigma) - _normal(below - self.sigma)
        return (
            self.low * _normal(below)
            + math.exp(mu + self.sigma**2 / 2) * inside
            + self.high * (1 - _normal(above))
        )


@dataclass(frozen=True)
class Workload:
    """The distributions of prompt and output lengths."""

    name: str
    inputs: Lengths
    outputs: Lengths

    def sample(self, num: int, seed: int) -> tuple[Int64, Int64]:
        """Draw prompt and output lengths of `num` requests."""
        rng = np.random.default_rng(seed)
        return self.inputs.sample(num, rng), self.outputs.sample(num, rng)


SHAREGPT = Workload("ShareGPT-like", Lengths(161.31, 1.2, 4, 1024), Lengths(337.99, 0.9, 4, 1024))
ALPACA = Workload("Alpaca-like", Lengths(19.31, 0.5, 4, 256), Lengths(58.45, 0.9, 4, 512))


def random_prompts(num: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Draw prompts of uniformly random token ids, all of one length."""
    rng = np.random.default_rng(seed)
    prompts: list[list[int]] = rng.integers(0, vocab_size, (num, length)).tolist()
    return prompts


def shared_prefix_prompts(
    num: int, shared: int, own: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Draw prompts with the same `shared` random tokens, followed by `own` tokens each."""
    prefix = random_prompts(1, shared, vocab_size, seed)[0]
    return [prefix + rest for rest in random_prompts(num, own, vocab_size, seed + 1)]


def token_ids_of(parts: Sequence[tuple[int, int]], vocab_size: int) -> list[int]:
    """Return a prompt made of parts, each a name and a number of tokens.

    Parts with the same name have the same tokens, so that equal prefixes give prefix hits."""
    names = np.array([name & 0xFFFF_FFFF_FFFF for name, _ in parts], np.uint64)
    counts = np.array([count for _, count in parts], np.int64)
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    mixed = _scramble(_scramble(np.repeat(names, counts)) + within.astype(np.uint64))
    size = np.uint64(max(vocab_size, SMALLEST_VOCABULARY) - FIRST_WORD)
    found: list[int] = (mixed % size + np.uint64(FIRST_WORD)).tolist()
    return found


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix the bits of 64-bit numbers (the finalizer of SplitMix64)."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _normal(x: float) -> float:
    """Return the probability that a standard normal is below x."""
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))
