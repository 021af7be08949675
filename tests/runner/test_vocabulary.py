"""Ranks that each have a part of the vocabulary choose the tokens that one rank chooses."""

import numpy as np
import pytest
import torch

from quire.base.masks import TokenMasks
from quire.ops.collective import RankGroup
from quire.ops.collectives.thread_group import run_ranks
from quire.ops.host.native import core
from quire.ops.sampling.logprobs import token_logprobs
from quire.runner.sampling.vocabulary import SharedVocabulary, best_of_parts
from tests.ops.test_mask import words_of
from tests.runner.test_sampler import Bench, Sampled

VOCAB = 97  # no number of ranks divides it; parts begin at ids that no 4 divides
PLAIN = [{"temperature": t} for t in (0.0, 1.0, 0.3, 2.0, 0.0, 1.0)]
MORE = {
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.7, "presence_penalty": 0.5},
    "bias": {"logit_bias": {96: 3.0, 5: -4.0}, "temperature": 0.0},
    "allowed": {"allowed_token_ids": [1, 50, 96]},
    "logprobs": {"logprobs": 3},
    "all logprobs": {"logprobs": -1},
}


def part_of(logits_NV: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a rank's part of the logits, padded with values that sampling would choose."""
    width = -(-logits_NV.shape[1] // size)
    mine = logits_NV[:, rank * width : (rank + 1) * width]
    return torch.nn.functional.pad(mine, (0, width - mine.shape[1]), value=1e9)


def sampled(
    group: RankGroup | None, rows: list[dict], logits_NV: torch.Tensor, masks: TokenMasks | None
) -> Sampled:
    bench = Bench(VOCAB) if group is None else Bench(VOCAB, group=group)
    for row, params in enumerate(rows):
        bench.start(row, seed=row + 7, **params)
    if group is not None and group.size > 1:
        logits_NV = part_of(logits_NV, group.rank, group.size)
    return bench.sample(logits_NV.clone(), *range(len(rows)), masks=masks)


def check(
    rows: list[dict], logits_NV: torch.Tensor, size: int, masks: TokenMasks | None = None
) -> Sampled:
    expected = sampled(None, rows, logits_NV, masks)
    for found in run_ranks(size, lambda group: sampled(group, rows, logits_NV, masks)):
        assert torch.equal(found.token_ids_N, expected.token_ids_N)
        assert found.candidates.keys() == expected.candidates.keys()
        for row, candidates in found.candidates.items():
            other = expected.candidates[row]
            assert candidates.rank == other.rank
            assert candidates.token_ids.tolist() == other.token_ids.tolist()
            assert candidates.logprobs.tolist() == other.logprobs.tolist()
        assert found.row_errors == expected.row_errors
    return expected


def random_logits(seed: int) -> torch.Tensor:
    return torch.randn(len(PLAIN), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_plain_rows_equal_one_rank(size: int) -> None:
    for seed in range(4):
        check(PLAIN, random_logits(seed), size)


@pytest.mark.parametrize("name", MORE)
def test_rows_that_need_all_logits_equal_one_rank(name: str) -> None:
    check([*PLAIN[:-1], MORE[name]], random_logits(1), 3)


def test_masked_rows_equal_one_rank() -> None:
    words = words_of([{3, 96, 40}, {95}], 4).numpy()
    masks = TokenMasks(np.array([1, 4], np.int32), words[:, None])
    found = check(PLAIN, random_logits(2), 2, masks)
    assert int(found.token_ids_N[4]) == 95


def test_ties_go_to_the_first_token() -> None:
    logits = torch.zeros(len(PLAIN), VOCAB)
    logits[:, [20, 40, 60, 96]] = 50.0
    found = check(PLAIN, logits, 4)
    assert found.token_ids_N[[0, 4]].tolist() == [20, 20]


def test_rows_without_a_choice_fail_on_all_ranks() -> None:
    logits = random_logits(3)
    logits[0, 90] = torch.nan  # on one rank alone
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3, :49] = -torch.inf  # one rank has no candidate, which is no error
    logits[5, 49:] = -torch.inf
    found = check(PLAIN, logits, 2)
    assert set(found.row_errors) == {0, 1, 2}


def test_ranks_without_the_core_equal_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.host.native.core", lambda: None)
    check(PLAIN, random_logits(4), 3)


def test_combined_logits_have_no_padding() -> None:
    logits = random_logits(5)

    def work(group: RankGroup) -> torch.Tensor:
        vocabulary = SharedVocabulary(VOCAB, group)
        whole = vocabulary.whole(part_of(logits, group.rank, group.size))
        assert vocabulary.whole(whole) is whole
        return whole

    for found in run_ranks(4, work):
        assert torch.equal(found, logits) and found.is_contiguous()
    result = token_logprobs(logits, torch.zeros(len(PLAIN), dtype=torch.int64), 2)
    assert int(result.token_ids.max()) < VOCAB


def test_equal_scores_take_the_smallest_id() -> None:
    pairs = torch.tensor([[[1.0, 70.0]], [[1.0, 30.0]], [[0.0, 2.0]]], dtype=torch.float64)
    ids, is_valid = best_of_parts(pairs)
    assert ids.tolist() == [30] and is_valid.tolist() == [True]


@pytest.mark.skipif(core() is None, reason="the C++ core was not built")
def test_noise_does_not_depend_on_the_parts_boundaries() -> None:
    """The vocabulary is large enough for several chunks of the core."""
    logits = torch.randn(6, 3001, generator=torch.Generator().manual_seed(6)) * 0.5
    expected = large_sample(None, logits)
    for size in (2, 3, 4):
        for found in run_ranks(size, lambda group: large_sample(group, logits)):
            assert found == expected


def large_sample(group: RankGroup | None, logits_NV: torch.Tensor) -> list[int]:
    num = logits_NV.shape[1]
    bench = Bench(num) if group is None else Bench(num, group=group)
    for row in range(len(logits_NV)):
        bench.start(row, seed=row, temperature=1.5)
    if group is not None:
        logits_NV = part_of(logits_NV, group.rank, group.size)
    found: list[int] = bench.sample(logits_NV, *range(len(logits_NV))).token_ids_N.tolist()
    return found


def test_rank_may_have_no_tokens() -> None:
    """Five tokens in parts of two leave none for the fourth rank."""
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(8))
    expected = large_sample(None, logits)
    assert run_ranks(4, lambda group: large_sample(group, logits)) == [expected] * 4
