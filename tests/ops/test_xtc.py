"""XTC: which tokens it excludes, how often, and that other choices stay unchanged."""

import numpy as np
import pytest
import torch

from quire.ops.host import native
from quire.ops.sampling.choice import Filters, Streams, choose
from quire.ops.sampling.philox import DOMAIN_XTC, uniform_at_reference
from quire.ops.sampling.xtc import Xtc, choose_with_xtc
from tests.support.kernels import sampling_oracle as oracle
from tests.support.kernels.sampling_oracle import random_logits

VOCAB = 60


@pytest.fixture(params=["core", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "core_for", lambda *tensors: None)


def streams_of(num: int, seed: int = 3) -> Streams:
    return Streams(torch.full((num,), seed), torch.zeros(num).long(), torch.arange(num))


def xtc_of(num: int, probability: float, threshold: float) -> Xtc:
    column = torch.full((num,), 1.0, dtype=torch.float64)
    return Xtc(column * probability, column * threshold, threshold)


def filters_of(num: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    column = torch.ones(num)
    return Filters(torch.full((num,), top_k), column * top_p, column * min_p)


def without_top(logits: np.ndarray, temperature: float, threshold: float, **filters) -> np.ndarray:
    """Return the distribution after filters and XTC, in float64."""
    p = oracle.filtered_distribution(logits, temperature, **filters)
    top = [token for token in oracle.falling_order(logits) if p[token] >= threshold]
    p[top[:-1]] = 0
    return p / p.sum()


SETTINGS = [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.9}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("threshold", [0.05, 0.2])
def test_samples_follow_the_distribution_without_top_choices(
    settings: dict, threshold: float
) -> None:
    num, temperature = 4000, 0.8
    logits = random_logits(1, VOCAB, 1.5)
    logits[0, 3], logits[0, 40] = 4.4, 4.2
    filters = filters_of(num, **settings) if settings else None
    ids = choose_with_xtc(
        logits.expand(num, VOCAB).contiguous(), torch.full((num,), temperature), streams_of(num),
        xtc_of(num, 1.0, threshold), filters,
    )  # fmt: skip
    expected = without_top(logits[0].double().numpy(), temperature, threshold, **settings)
    assert (expected == 0).any()
    counts = np.bincount(ids.numpy(), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    assert abs(oracle.chi_square_z(counts, expected)) < 4.5


@pytest.mark.parametrize("settings", SETTINGS)
def test_xtc_applies_with_its_probability_and_changes_no_other_draw(settings: dict) -> None:
    num = 3000
    logits = random_logits(1, VOCAB, 1.5)
    logits[0, 3], logits[0, 40] = 4.4, 4.2
    logits = logits.expand(num, VOCAB).contiguous()
    temperatures, streams = torch.ones(num), streams_of(num)
    filters = filters_of(num, **settings) if settings else None
    plain = choose(logits, temperatures, streams, filters)
    always = choose_with_xtc(logits, temperatures, streams, xtc_of(num, 1.0, 0.1), filters)
    found = choose_with_xtc(logits, temperatures, streams, xtc_of(num, 0.3, 0.1), filters)
    zeros = torch.zeros(num, 1).long()
    noise = uniform_at_reference(
        streams.seeds, streams.sample_index, streams.positions, zeros, DOMAIN_XTC
    )
    is_drawn = noise[:, 0] < 0.3
    assert abs(float(is_drawn.float().mean()) - 0.3) < 0.03
    assert torch.equal(found, torch.where(is_drawn, always, plain))
    assert not torch.equal(always, plain)
    never = choose_with_xtc(logits, temperatures, streams, xtc_of(num, 0.0, 0.1), filters)
    assert torch.equal(never, plain)


def test_xtc_is_the_same_in_any_batch_for_large_vocabularies() -> None:
    num, vocab = 3, 5000
    logits = random_logits(num, vocab, 0.1)
    logits[:, 7], logits[:, 9] = 8.0, 7.5
    row = (torch.ones(num), streams_of(num), xtc_of(num, 1.0, 0.05))
    for filters in (filters_of(num, top_p=0.999), filters_of(num, min_p=1e-9), None):
        together = choose_with_xtc(logits, *row, filters)
        assert 7 not in together.tolist()
        for n in range(num):
            one = torch.tensor([n])
            alone = choose_with_xtc(
                logits[one], row[0][one], row[1].of(one), row[2].of(one),
                None if filters is None else filters.of(one),
            )  # fmt: skip
            assert alone.tolist() == [int(together[n])]
