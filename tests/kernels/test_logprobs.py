"""Compare log-probabilities, ranks and most probable tokens with the torch reference."""

import pytest
import torch

from quire.ops.kernels.sampling import logprobs
from quire.ops.sampling import logprobs as reference
from quire.ops.sampling.top_k import top_k_reference
from tests.support.kernels.sampling_oracle import random_logits

# Error of a float32 log-probability. The kernel sums pairwise: 7 levels within a group of
# 128 and 11 over the 1,187 groups of the largest vocabulary, each with a relative error of 2**-24,
# and exp with two more: 1.2e-6 of the sum, so as much of its logarithm. Two differences of values
# below 32 add 2**-20 each: 1.9e-6.
ATOL = 4e-6


def check(logits_RV: torch.Tensor, chosen_R: torch.Tensor, num_candidates: int) -> None:
    found = logprobs.token_logprobs(logits_RV, chosen_R, num_candidates)
    logits_RV = logits_RV.float()
    ids = chosen_R[:, None]
    if num_candidates > 0:
        best = top_k_reference(logits_RV, min(num_candidates, logits_RV.shape[-1]))[1]
        ids = torch.cat((ids, best), dim=-1)
    assert torch.equal(found.token_ids, ids)
    assert torch.equal(found.ranks, reference.token_rank_reference(logits_RV, chosen_R))
    exact = logits_RV.double().log_softmax(dim=-1).gather(-1, ids)
    torch.testing.assert_close(found.logprobs.double(), exact, atol=ATOL, rtol=1e-6)


@pytest.mark.parametrize("num_candidates", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab_size", [1, 50, 1000, 4099])
def test_logprobs_ranks_and_candidates_equal_the_reference(
    vocab_size: int, num_candidates: int, dtype: torch.dtype, device: torch.device
) -> None:
    logits = random_logits(5, vocab_size, 3.0).to(dtype).to(device)
    chosen = torch.arange(5, device=device) * 211 % vocab_size
    check(logits, chosen, num_candidates)


@pytest.mark.parametrize("num_candidates", [3, 20])
def test_ties_and_masked_tokens_equal_the_reference(
    num_candidates: int, device: torch.device
) -> None:
    """Few distinct logits, zeros of both signs, rows with fewer finite logits than candidates."""
    logits = random_logits(6, 700, 1.0).round()
    logits[:, ::5] *= -1
    logits[1, 12:] = -torch.inf
    logits[2] = 0.0
    logits[3, :-1] = -torch.inf
    logits[4, 128:640] = -torch.inf
    chosen = torch.tensor([699, 0, 350, 5, 127, 128], device=device)
    check(logits.to(device), chosen, num_candidates)


def test_many_candidates_equal_the_reference(device: torch.device) -> None:
    check(random_logits(2, 300, 1.0).half().to(device), torch.tensor([3, 4], device=device), 100)


def test_logits_may_be_a_slice_with_a_large_vocabulary(device: torch.device) -> None:
    wide = random_logits(2, 151_936 + 64, 3.0).half().to(device)
    check(wide[:, 64:], torch.tensor([151_935, 7], device=device), 20)


def test_no_rows_give_no_results(device: torch.device) -> None:
    empty = torch.empty(0, dtype=torch.int64, device=device)
    assert logprobs.token_logprobs(torch.empty(0, 9, device=device), empty, 3).ranks.shape == (0,)


def test_rows_with_nan_return_valid_token_ids(device: torch.device) -> None:
    logits = random_logits(3, 300, 1.0)
    logits[0], logits[1, 7] = torch.nan, torch.nan
    chosen = torch.zeros(3, dtype=torch.int64, device=device)
    found = logprobs.token_logprobs(logits.to(device), chosen, 20)
    assert ((found.token_ids >= 0) & (found.token_ids < 300)).all()
    check(logits[2:].to(device), chosen[2:], 20)
    assert torch.equal(
        found.token_ids[2],
        logprobs.token_logprobs(logits[2:].to(device), chosen[2:], 20).token_ids[0],
    )
