"""Filters at their exact boundaries, where one more token, or one less, could be kept.

With equal logits, shares of the mass are exact, and so are the boundaries.
"""

import pytest
import torch

from quire.ops.sampling.choice import choose_reference, keep_candidates
from tests.ops.test_sampling import PATHS, draw, make_filters

VOCAB = 1500  # more than are examined first
DRAWS = 400


def equal_logits(num: int, vocab_size: int = VOCAB) -> torch.Tensor:
    """Return logits of `num` tokens with equal probabilities; others cannot be chosen."""
    logits_RV = torch.full((DRAWS, vocab_size), -torch.inf)
    logits_RV[:, 3 : 3 + num] = 0.5
    return logits_RV


def drawn(path, logits_RV: torch.Tensor, **filters) -> set[int]:
    return {token_id - 3 for token_id in draw(path, logits_RV, **filters).tolist()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("vocab_size", [12, VOCAB])
@pytest.mark.parametrize("top_k", [0, 4, 7])
@pytest.mark.parametrize(("top_p", "num"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)])
def test_full_nucleus_takes_no_more_tokens(path, vocab_size, top_k, top_p, num):
    """Two of four equal tokens are half of the mass: top_p of 0.5 keeps these two."""
    kept = drawn(path, equal_logits(4, vocab_size), top_p=top_p, top_k=top_k)
    assert kept == set(range(num))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("more", [{}, {"top_k": 9}, {"top_p": 0.999}])
def test_tokens_exactly_at_the_limit_of_min_p_are_kept(path, more):
    assert drawn(path, equal_logits(5), min_p=1.0, **more) == set(range(5))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_top_k_keeps_the_first_k_of_equal_tokens(path, num):
    assert drawn(path, equal_logits(5), top_k=num) == set(range(num))


@pytest.mark.parametrize("path", PATHS)
def test_nucleus_may_be_wider_than_the_first_examined_tokens(path):
    logits_RV = torch.zeros(4000, VOCAB)
    ids = draw(path, logits_RV, top_p=0.75)
    assert ids.max() < 1125 and (ids > 1024).any()


def is_done(values: list[float], num_more: int = 7, **filters) -> bool:
    """Return whether only these largest logits can be chosen; the rest are just below."""
    scaled_RK = torch.tensor([values], dtype=torch.float64)
    rest = torch.full((1, num_more), min(values) - 1e-9, dtype=torch.float64)
    total_R = torch.cat([scaled_RK, rest], dim=1).logsumexp(1)
    vocab_size = len(values) + num_more
    return bool(keep_candidates(scaled_RK, total_R, make_filters(1, **filters), vocab_size)[1][0])


def test_search_is_done_when_only_the_largest_can_be_chosen():
    falling = [3.0, 2.0, 1.0]
    assert is_done(falling, top_k=3) and not is_done(falling, top_k=4)
    assert is_done(falling, num_more=0)
    assert not is_done(falling)
    assert is_done([0.0, -1.0, -9.0], min_p=0.01)  # the last is excluded, and so are all below
    assert not is_done([0.0, -1.0, -2.0], min_p=0.01)
    assert not is_done([0.0, 0.0, 0.0], min_p=1.0)
    assert is_done([9.0, 0.0, 0.0], top_p=0.9)  # the first is the whole nucleus
    assert not is_done([1.0, 1.0, 1.0], top_p=0.9)
    # The mass of the tokens that min-p and top-k keep is not known before all are examined.
    assert not is_done([2.0, 2.0, 2.0], top_p=0.2, min_p=0.5)
    assert not is_done([2.0, 2.0, 2.0], top_p=0.2, top_k=5)


def test_mass_of_a_row_includes_all_tokens():
    """3 of 10 equal tokens are examined: half of the mass is 5 tokens, not 2."""
    scaled_RK = torch.zeros(1, 3, dtype=torch.float64)
    total_R = torch.tensor([10.0], dtype=torch.float64).log()
    kept_RK, done_R = keep_candidates(scaled_RK, total_R, make_filters(1, top_p=0.5), 10)
    assert kept_RK.all() and not done_R.any()
    kept_RK, done_R = keep_candidates(scaled_RK, total_R, make_filters(1, top_p=0.15), 10)
    assert kept_RK.tolist() == [[True, True, False]] and done_R.all()


def test_filters_that_pass_all_tokens_equal_no_filter():
    logits_RV = torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    plain = draw(choose_reference, logits_RV)
    assert torch.equal(draw(choose_reference, logits_RV, top_p=1.0), plain)
    assert torch.equal(draw(choose_reference, logits_RV, top_k=200), plain)
