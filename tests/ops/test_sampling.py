"""Sampling of tokens: distributions, filters, order, independence of the batch.

Both paths are tested: the C++ core (if it was built) and the torch reference.
"""

import numpy as np
import pytest
import torch

from quire.ops.host import native
from quire.ops.sampling import choice as sampling
from quire.ops.sampling import logprobs, top_k
from quire.ops.sampling.choice import Filters, Streams, choose, choose_reference
from quire.ops.sampling.logprobs import log_sum_exp, log_sum_exp_reference
from quire.ops.sampling.penalties import Penalties, apply_penalties
from tests.support.kernels import sampling_oracle as oracle
from tests.support.kernels.sampling_oracle import FILTERS, random_logits

PATHS = [pytest.param(choose_reference, id="torch")]
if native.core() is not None:
    PATHS.append(pytest.param(choose, id="core"))


def make_streams(num_rows: int, seed: int = 11) -> Streams:
    return Streams(
        torch.full((num_rows,), seed),
        torch.zeros(num_rows, dtype=torch.int64),
        torch.arange(num_rows),
    )


def make_filters(num_rows: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Filters:
    return Filters(
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p),
        torch.full((num_rows,), min_p),
    )


def draw(path, logits_RV: torch.Tensor, temperature: float = 1.0, seed: int = 11, **filters):
    num_rows = len(logits_RV)
    return path(
        logits_RV,
        torch.full((num_rows,), temperature),
        make_streams(num_rows, seed),
        make_filters(num_rows, **filters) if filters else None,
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_samples_follow_the_filtered_distribution(path, settings):
    """Compare counts over many positions with the exact distribution of a plain implementation."""
    logits_V = random_logits(1, 61, 1.5)[0]
    num_draws = 12_000
    ids = draw(path, logits_V.repeat(num_draws, 1), **settings)
    counts = np.bincount(ids.numpy(), minlength=61)
    expected = oracle.filtered_distribution(logits_V.double().numpy(), **settings)
    assert abs(oracle.chi_square_z(counts, expected)) < 4.5


@pytest.mark.parametrize("path", PATHS)
def test_samples_follow_the_distribution_over_indices_and_seeds(path):
    logits_V = random_logits(1, 61, 1.5)[0]
    expected = oracle.filtered_distribution(logits_V.double().numpy())
    many = torch.arange(12_000)
    zeros = torch.zeros_like(many)
    for streams in (Streams(many, zeros, zeros), Streams(zeros, many, zeros)):
        ids = path(logits_V.repeat(len(many), 1), torch.ones(len(many)), streams)
        counts = np.bincount(ids.numpy(), minlength=61)
        assert abs(oracle.chi_square_z(counts, expected)) < 4.5


@pytest.mark.skipif(native.core() is None, reason="the C++ core was not built")
@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("vocab_size", [5, 256, 1023, 5001])
def test_core_chooses_the_tokens_of_torch(spread, vocab_size):
    """One batch has every filter, narrow and wide nuclei, rounded logits (ties) and masks."""
    settings = [*FILTERS, {"top_k": 2000, "top_p": 0.9}, {"top_k": 10**6}]
    logits_RV = random_logits(len(settings) * 4, vocab_size, spread).bfloat16().float()
    logits_RV[:, 1::3] = -torch.inf
    num_rows = len(logits_RV)

    def column(name: str, default: float) -> torch.Tensor:
        return torch.tensor([item.get(name, default) for item in settings] * 4)

    filters = Filters(column("top_k", 0), column("top_p", 1.0), column("min_p", 0.0))
    temperatures = column("temperature", 1.0)
    streams = make_streams(num_rows)
    expected = choose_reference(logits_RV, temperatures, streams, filters)
    assert torch.equal(choose(logits_RV, temperatures, streams, filters), expected)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_row_is_the_same_alone_and_in_a_batch(path, settings):
    logits_RV = random_logits(5, 3000, 2.0)
    arguments = dict(settings)
    temperatures = torch.full((5,), arguments.pop("temperature", 1.0))
    filters, streams = make_filters(5, **arguments), make_streams(5)
    together = path(logits_RV, temperatures, streams, filters)
    for row in range(5):
        one = torch.tensor([row])
        alone = path(logits_RV[one], temperatures[one], streams.of(one), filters.of(one))
        assert alone[0] == together[row]


def test_known_largest_top_k_does_not_change_tokens():
    logits_RV = random_logits(40, 3000, 1.0)
    filters = make_filters(40, top_k=50, top_p=0.9)
    arguments = (logits_RV, torch.ones(40), make_streams(40), filters)
    assert torch.equal(choose_reference(*arguments, 50), choose_reference(*arguments))


@pytest.mark.parametrize("path", PATHS)
def test_filters_that_pass_all_tokens_change_nothing(path):
    logits_RV = random_logits(50, 2000, 1.0)
    plain = draw(path, logits_RV)
    assert torch.equal(draw(path, logits_RV, top_k=2000), plain)
    assert torch.equal(draw(path, logits_RV, min_p=1e-30), plain)


@pytest.mark.parametrize("path", PATHS)
def test_wide_nucleus_gives_the_choice_among_all_tokens(path):
    """The nucleus has more tokens than are examined first."""
    logits_RV = random_logits(8, 4000, 0.1)
    streams = make_streams(8)
    filters = make_filters(8, top_p=0.9)
    all_tokens = sampling.choose_among(logits_RV, torch.ones(8), filters, streams, 4000)[0]
    assert torch.equal(path(logits_RV, torch.ones(8), streams, filters), all_tokens)


@pytest.mark.skipif(native.core() is None, reason="the C++ core was not built")
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_core_chooses_the_tokens_of_torch_in_any_nucleus(spread):
    """Nuclei have one token to nearly all; the winner of all tokens is often outside."""
    shares = [1e-6, 0.02, 0.1, 0.3, 0.7, 0.95, 0.9999]
    logits_RV = random_logits(len(shares) * 30, 3000, spread).bfloat16().float()
    temperatures, streams = torch.full((len(logits_RV),), 0.8), make_streams(len(logits_RV))
    filters = make_filters(len(logits_RV))
    filters.top_p[:] = torch.tensor(shares * 30)
    every = sampling.choose_among(logits_RV, temperatures, filters, streams, 3000)[0]
    assert torch.equal(choose(logits_RV, temperatures, streams, filters), every)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("vocab_size", [64, 2048])
def test_nucleus_ends_exactly_where_top_p_is_reached(path, vocab_size):
    """Logits are equal: with top_p of 1/4 the nucleus is exactly the first quarter. With the next
    float32 it has one token more."""
    num_draws, quarter = 2000, vocab_size // 4
    logits_RV = torch.full((num_draws, vocab_size), -1.5)
    streams = make_streams(num_draws)
    u_RV = sampling.uniform(streams.seeds, streams.sample_index, streams.positions, vocab_size)
    above = float(np.nextafter(np.float32(0.25), np.float32(1)))
    for top_p, width in ((0.25, quarter), (above, quarter + 1)):
        expected = u_RV[:, :width].argmin(dim=-1)
        assert expected.max() == width - 1  # the last token is chosen, if it may be
        assert torch.equal(draw(path, logits_RV, top_p=top_p), expected)


@pytest.mark.parametrize("path", PATHS)
def test_rows_without_valid_logits_give_valid_token_ids(path):
    logits_RV = random_logits(4, 2000, 1.0)
    logits_RV[0] = torch.nan
    logits_RV[1] = -torch.inf
    logits_RV[2, 5] = -torch.nan
    ids = draw(path, logits_RV, top_k=20, top_p=0.9)
    assert ((ids >= 0) & (ids < 2000)).all()
    assert ids[3] == draw(path, logits_RV[3:].repeat(4, 1), top_k=20, top_p=0.9)[3]


ARG_MAX = [top_k.arg_max, top_k.arg_max_reference]


@pytest.mark.parametrize("arg_max", ARG_MAX)
@pytest.mark.parametrize("vocab_size", [1, 255, 256, 1000])
def test_arg_max_returns_the_lowest_id_of_ties(arg_max, vocab_size):
    logits_RV = random_logits(30, vocab_size, 1.0).round()
    ids, values = arg_max(logits_RV)
    for row, logits_V in enumerate(logits_RV.numpy()):
        assert ids[row] == np.argmax(logits_V)
        assert values[row] == logits_V.max()


@pytest.mark.parametrize("arg_max", ARG_MAX)
def test_arg_max_treats_zeros_of_either_sign_as_equal(arg_max):
    assert arg_max(torch.tensor([[-1.0, -0.0, 0.0, -0.0]]))[0].tolist() == [1]


@pytest.mark.parametrize("arg_max", ARG_MAX)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_arg_max_returns_nan(arg_max, sign):
    logits_RV = random_logits(2, 700, 1.0)
    logits_RV[1, 650] = torch.tensor(torch.nan).copysign(torch.tensor(sign))
    values = arg_max(logits_RV)[1]
    assert values[0].isfinite() and values[1].isnan()


@pytest.mark.parametrize("path", [top_k.top_k, top_k.top_k_reference])
@pytest.mark.parametrize("k", [1, 2, 17, 500, 777])
def test_top_k_breaks_ties_by_the_lowest_id(path, k):
    logits_RV = (random_logits(6, 777, 2.0) * 2).round()  # many ties
    logits_RV[1, 50:] = -torch.inf
    logits_RV[2] = 0.0
    values, ids = path(logits_RV, k)
    for row, logits_V in enumerate(logits_RV.numpy()):
        expected = oracle.falling_order(logits_V)[:k]
        assert ids[row].tolist() == expected
        assert values[row].tolist() == logits_V[expected].tolist()


@pytest.mark.parametrize("path", [log_sum_exp, log_sum_exp_reference])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_log_sum_exp_equals_float64(path, spread):
    logits_RV = random_logits(7, 1301, spread)
    logits_RV[3, :1000] = -torch.inf
    temperatures = torch.linspace(0.2, 2.0, 7)
    expected = torch.logsumexp(logits_RV.double() / temperatures.double()[:, None], dim=-1)
    tolerance = 1e-6 * expected.abs().max()
    assert (path(logits_RV, temperatures) - expected).abs().max() < tolerance
    assert path(logits_RV)[2] == path(logits_RV[2:3])[0]


def test_logprobs_and_ranks_equal_float64():
    logits_RV = random_logits(9, 500, 3.0).round(decimals=0)
    chosen = torch.arange(9) * 50
    result = logprobs.token_logprobs(logits_RV, chosen, 6)
    expected_RV = torch.log_softmax(logits_RV.double(), dim=-1).numpy()
    for row in range(9):
        order = oracle.falling_order(logits_RV[row].numpy())
        token_ids = [int(chosen[row]), *order[:6]]
        assert result.token_ids[row].tolist() == token_ids
        np.testing.assert_allclose(result.logprobs[row], expected_RV[row, token_ids], atol=2e-6)
        assert result.ranks[row] == order.index(int(chosen[row])) + 1
    reference = logprobs.token_rank_reference(logits_RV, chosen)
    assert torch.equal(reference, result.ranks)


@pytest.mark.parametrize("num_candidates", [0, 1, 20, 500, 10_000])
def test_number_of_candidates_is_limited_by_the_vocabulary(num_candidates):
    result = logprobs.token_logprobs(
        random_logits(2, 50, 1.0), torch.tensor([3, 4]), num_candidates
    )
    assert result.logprobs.shape == (2, 1 + min(num_candidates, 50))


@pytest.mark.parametrize(
    "penalties",
    [(0.7, 0.0, 1.0), (0.0, -0.4, 1.0), (0.0, 0.0, 1.8), (0.0, 0.0, 0.5), (-1.0, 0.3, 1.2)],
)
def test_penalties_equal_the_oracle(penalties):
    logits_RV = random_logits(6, 40, 2.0)
    generator = torch.Generator().manual_seed(3)
    tokens_RM = torch.randint(0, 40, (6, 30), generator=generator, dtype=torch.int32)
    tokens_RM[:, 29] = -1  # beyond every row's length
    lengths, prompt_lens = torch.tensor([29, 5, 12, 1, 20, 7]), torch.tensor([10, 5, 0, 1, 19, 3])
    changed_RV = logits_RV.clone()
    which = torch.tensor([5, 0, 2, 3, 4])
    columns = Penalties(*(torch.full((5,), value) for value in penalties))
    apply_penalties(
        changed_RV, which, tokens_RM[which], lengths[which], prompt_lens[which], columns
    )
    assert torch.equal(changed_RV[1], logits_RV[1])
    for row in which.tolist():
        length, prompt_len = int(lengths[row]), int(prompt_lens[row])
        tokens = tokens_RM[row].tolist()
        expected = oracle.penalised(
            logits_RV[row].double().numpy(),
            tokens[:prompt_len],
            tokens[prompt_len:length],
            *penalties,
        )
        np.testing.assert_allclose(changed_RV[row], expected, rtol=1e-6, atol=1e-6)
