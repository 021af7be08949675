"""Lengths have their nominal means, and the seed determines all values."""

import numpy as np
import pytest

from quire.tools.workloads import (
    ALPACA,
    SHAREGPT,
    Lengths,
    Workload,
    random_prompts,
    shared_prefix_prompts,
)


@pytest.mark.parametrize("workload", [SHAREGPT, ALPACA], ids=lambda w: w.name)
def test_samples_have_nominal_means_and_bounds(workload: Workload) -> None:
    inputs, outputs = workload.sample(200_000, seed=1)
    for lengths, drawn in ((workload.inputs, inputs), (workload.outputs, outputs)):
        assert drawn.mean() == pytest.approx(lengths.mean, rel=0.02)
        assert drawn.min() >= lengths.low and drawn.max() <= lengths.high
        assert len(np.unique(drawn)) > 50


def test_means_are_those_of_the_paper() -> None:
    means = [w.mean for w in (SHAREGPT.inputs, SHAREGPT.outputs, ALPACA.inputs, ALPACA.outputs)]
    assert means == [161.31, 337.99, 19.31, 58.45]


def test_seed_determines_the_lengths() -> None:
    first, second, other = (SHAREGPT.sample(100, seed) for seed in (3, 3, 4))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_mean_survives_hard_clipping() -> None:
    lengths = Lengths(mean=50, sigma=2.0, low=10, high=100)
    drawn = lengths.sample(200_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(50, rel=0.02)


def test_random_prompts_have_fixed_lengths_and_seed() -> None:
    prompts = random_prompts(3, 7, vocab_size=11, seed=5)
    assert [len(prompt) for prompt in prompts] == [7, 7, 7]
    assert all(0 <= token < 11 for prompt in prompts for token in prompt)
    assert prompts == random_prompts(3, 7, vocab_size=11, seed=5)
    assert prompts != random_prompts(3, 7, vocab_size=11, seed=6)


def test_prompts_share_only_their_prefix() -> None:
    prompts = shared_prefix_prompts(4, shared=20, own=5, vocab_size=1000, seed=0)
    assert all(prompt[:20] == prompts[0][:20] for prompt in prompts)
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 4
