"""Sampling written plainly in numpy, one row at a time: what the tests compare with."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float64]


def falling_order(logits: Floats) -> list[int]:
    """Token ids, the largest logit first, ties by lowest id."""
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def filtered_distribution(
    logits: Floats,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Floats:
    """The probabilities that a row is sampled from: min-p, then top-k, then top-p."""
    probabilities = softmax(logits / temperature)
    order = falling_order(logits)
    kept = [i for i in order if probabilities[i] >= min_p * probabilities[order[0]]]
    if top_k > 0:
        kept = kept[:top_k]
    goal = top_p * sum(probabilities[i] for i in kept)
    nucleus, mass = [], 0.0
    for token_id in kept:
        if top_p < 1 and mass >= goal:
            break
        nucleus.append(token_id)
        mass += probabilities[token_id]
    result = np.zeros_like(probabilities)
    result[nucleus] = probabilities[nucleus] / mass
    return result


def penalised(
    logits: Floats,
    prompt: Sequence[int],
    output: Sequence[int],
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
) -> Floats:
    """The logits after penalties."""
    result = logits.copy()
    for token_id in {*prompt, *output}:
        value = result[token_id]
        result[token_id] = value / repetition if value > 0 else value * repetition
    for token_id in output:
        result[token_id] -= frequency
    for token_id in set(output):
        result[token_id] -= presence
    return result


def chi_square_z(counts: npt.NDArray[np.int64], probabilities: Floats) -> float:
    """Distance of observed counts from a distribution, as a standard normal deviate.

    Cells of small expectation are put together. Wilson and Hilferty's approximation.
    """
    total = counts.sum()
    assert counts[probabilities == 0].sum() == 0, "a token of probability 0 was chosen"
    expected = probabilities * total
    is_large = expected >= 8
    observed_cells = [*counts[is_large], counts[~is_large].sum()]
    expected_cells = [*expected[is_large], expected[~is_large].sum()]
    if expected_cells[-1] < 1:
        observed_cells.pop()
        expected_cells.pop()
    pairs = zip(observed_cells, expected_cells, strict=True)
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in pairs)
    freedom = max(len(expected_cells) - 1, 1)
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.1, "temperature": 1.3},
    {"top_p": 0.7, "min_p": 0.01},
]


def random_logits(num_rows: int, vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * spread
