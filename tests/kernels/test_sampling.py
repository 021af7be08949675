"""Sampling on the device chooses the torch reference's tokens, in every mixture of rows."""

import numpy as np
import pytest
import torch

from quire.ops.kernels.sampling import sampling
from quire.ops.kernels.sampling.sampling import SamplingColumns
from quire.ops.sampling import choice as reference
from quire.ops.sampling.choice import Filters, Streams
from quire.ops.sampling.top_k import arg_max_reference
from quire.runner.sampling.vocabulary import best_of_parts
from tests.support.kernels import sampling_oracle as oracle
from tests.support.kernels.sampling_oracle import FILTERS, random_logits

SETTINGS = [
    *FILTERS,
    {"top_k": 500, "top_p": 0.9},
    {"top_k": 10**6},
    {"top_p": 0.999},
    {"min_p": 1e-30},
    {"top_p": 0.3, "temperature": 0.05},
]
# Groups of 128 tokens in memory: all of a row, or so few that most rows are read repeatedly.
HELD = [pytest.param(8, id="held"), pytest.param(2, id="passes")]


def columns_of(settings: list[dict[str, float]], device: torch.device) -> SamplingColumns:
    def column(name: str, default: float) -> torch.Tensor:
        return torch.tensor([item.get(name, default) for item in settings], device=device)

    count = len(settings)
    return SamplingColumns(
        column("temperature", 1.0),
        column("top_k", 0),
        column("top_p", 1.0),
        column("min_p", 0.0),
        torch.arange(-3, count - 3, device=device) * 2**40 + 11,
        torch.arange(count, device=device) % 3,
    )


def expected_tokens(
    logits_NV: torch.Tensor, columns: SamplingColumns, positions: torch.Tensor
) -> torch.Tensor:
    """Return the reference's choice in each row; rows of temperature 0 are greedy."""
    logits_NV = logits_NV.float()
    is_random = columns.temperature > 0
    temperatures = torch.where(is_random, columns.temperature, 1.0)
    streams = Streams(columns.seeds, columns.sample_index, positions)
    filters = Filters(columns.top_k, columns.top_p, columns.min_p)
    whole = logits_NV.shape[-1]
    ids, _ = reference.choose_among(logits_NV, temperatures, filters, streams, whole)
    return torch.where(is_random, ids, arg_max_reference(logits_NV)[0])


def check(logits_NV, settings, device, **keywords) -> None:
    logits_NV = logits_NV.to(device)
    columns = columns_of(settings, device)
    positions = torch.arange(len(settings), device=device) + 5
    ids, is_valid = sampling.sample(logits_NV, columns, positions, **keywords)
    assert torch.equal(ids, expected_tokens(logits_NV, columns, positions))
    assert is_valid.all()


@pytest.mark.parametrize("vocab_size", [1, 5, 127, 1000, 2049])
def test_random_and_greedy_rows_equal_the_reference(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    settings = [{"temperature": t} for t in (1.0, 0.0, 0.3, 2.5, 0.0, 1.0)]
    logits = random_logits(6, vocab_size, 2.0).to(dtype)
    check(logits, settings, device, has_filters=False)


@pytest.mark.parametrize(
    ("spread", "dtype", "max_groups"),
    [
        (0.02, torch.float32, 2),
        (1.0, torch.float16, 8),
        (4.0, torch.float32, 2),
        (12.0, torch.bfloat16, 8),
    ],
    ids=str,
)
def test_filtered_rows_equal_the_reference(
    spread: float, dtype: torch.dtype, max_groups: int, device: torch.device
) -> None:
    """Every filter alongside plain and greedy rows: narrow and wide nuclei, masked tokens."""
    settings = [{"temperature": 0.0}, *SETTINGS, {"temperature": 0.0, "top_k": 3}]
    logits = random_logits(len(settings), 1000, spread, seed=int(spread)).to(dtype)
    logits[:, 1::3] = -torch.inf
    check(logits, settings, device, has_filters=True, max_groups=max_groups)


@pytest.mark.parametrize(("levels", "max_groups"), [(1.0, 2), (8.0, 8)])
def test_filters_break_ties_by_the_lowest_id(
    levels: float, max_groups: int, device: torch.device
) -> None:
    """Few distinct logits, zeros of both signs among them: cutoffs fall among equal tokens."""
    logits = (random_logits(len(SETTINGS), 700, 1.0, seed=4) * levels).round() / levels
    logits[:, ::7] *= -1
    check(logits, SETTINGS, device, has_filters=True, max_groups=max_groups)


@pytest.mark.parametrize(("shift", "max_groups"), [(100.0, 8), (-3.0, 2), (-100.0, 8)])
def test_filters_take_logits_of_any_sign(
    shift: float, max_groups: int, device: torch.device
) -> None:
    logits = (random_logits(len(SETTINGS), 600, 1.5, seed=6) + shift).bfloat16()
    check(logits, SETTINGS, device, has_filters=True, max_groups=max_groups)


@pytest.mark.parametrize("max_groups", HELD)
def test_filters_keep_the_first_of_equal_tokens(max_groups: int, device: torch.device) -> None:
    """Of n equal tokens top-p keeps the first ceil(p n), and top-k the first k."""
    settings = [{"top_p": 0.5}, {"top_k": 100}, {"top_k": 100, "top_p": 0.25}, {"min_p": 0.9}]
    num_kept = [300, 100, 25, 600]
    columns = columns_of(settings, device)
    logits = torch.zeros(4, 600, device=device)
    for position in range(3):
        positions = torch.full((4,), position, device=device)
        ids, _ = sampling.sample(
            logits, columns, positions, has_filters=True, max_groups=max_groups
        )
        assert torch.equal(ids, expected_tokens(logits, columns, positions))
        assert (ids.cpu() < torch.tensor(num_kept)).all()


@pytest.mark.parametrize("has_filters", [False, True])
def test_rows_of_a_large_vocabulary_equal_the_reference(
    has_filters: bool, device: torch.device
) -> None:
    """Rows are gathered from the columns, and logits are a slice of a wider tensor."""
    settings = [{"top_k": 20, "top_p": 0.8}, {"temperature": 0.0}, {"temperature": 0.8}]
    if has_filters:
        settings.append({"top_p": 0.95, "min_p": 0.02})
    columns = columns_of(settings, device)
    rows = torch.arange(len(settings) - 1, 0, -1, device=device)
    if has_filters:
        rows = torch.cat((rows, torch.zeros(1, dtype=torch.int64, device=device)))
    wide = random_logits(len(rows), 151_936 + 64, 3.0, seed=9).half().to(device)
    logits = wide[:, 64:]
    positions = torch.arange(len(rows), device=device) + 70
    ids, is_valid = sampling.sample(logits, columns, positions, rows, has_filters=has_filters)
    chosen = SamplingColumns(*(getattr(columns, name)[rows] for name in vars(columns)))
    assert torch.equal(ids, expected_tokens(logits, chosen, positions))
    assert is_valid.all()


@pytest.mark.parametrize("has_filters", [False, True])
def test_rows_without_a_valid_token_are_marked_invalid(
    has_filters: bool, device: torch.device
) -> None:
    logits = random_logits(7, 3000, 1.0)
    logits[0, 2500] = torch.nan
    logits[1, 7] = -torch.nan
    logits[2] = -torch.inf
    logits[3, 40] = torch.inf
    logits[4] = torch.nan
    logits[5, 1:] = -torch.inf
    logits = logits.to(device)
    for temperature in 0.0, 1.0:
        columns = columns_of([{"temperature": temperature, "top_k": 5, "top_p": 0.9}] * 7, device)
        positions = torch.zeros(7, dtype=torch.int64, device=device)
        ids, is_valid = sampling.sample(logits, columns, positions, has_filters=has_filters)
        assert is_valid.tolist() == [False] * 5 + [True] * 2
        assert ids[:6].tolist() == [0] * 6


def test_no_rows_give_no_tokens(device: torch.device) -> None:
    ids, is_valid = sampling.sample(
        torch.empty(0, 50, device=device), columns_of([], device),
        torch.empty(0, dtype=torch.int64, device=device), has_filters=True,
    )  # fmt: skip
    assert len(ids) == len(is_valid) == 0


def test_scores_that_float32_rounds_equal_are_decided_in_float64(device: torch.device) -> None:
    """Logits are so large that their sum with the noise loses the noise in float32."""
    logits = random_logits(10, 60, 0.001, seed=2) + 1.2e7
    settings = [{"temperature": 1.0}] * 7 + [{"top_k": 50}] * 3
    check(logits, settings, device, has_filters=True, max_groups=1)


@pytest.mark.parametrize("settings", [{"temperature": 1.3}, {"top_k": 20, "top_p": 0.8}], ids=str)
def test_samples_follow_the_filtered_distribution(
    settings: dict[str, float], device: torch.device
) -> None:
    num_draws = 60 if device.type == "cpu" else 12_000
    logits_V = random_logits(1, 61, 1.5)[0]
    columns = columns_of([settings], device)
    rows = torch.zeros(num_draws, dtype=torch.int64, device=device)
    ids, _ = sampling.sample(
        logits_V.repeat(num_draws, 1).to(device), columns,
        torch.arange(num_draws, device=device), rows, has_filters=len(settings) > 1, max_groups=1,
    )  # fmt: skip
    counts = np.bincount(ids.cpu().numpy(), minlength=61)
    expected = oracle.filtered_distribution(logits_V.double().numpy(), **settings)
    assert abs(oracle.chi_square_z(counts, expected)) < 4.5


@pytest.mark.parametrize(("vocab_size", "num_parts"), [(5, 2), (97, 3), (4200, 2), (4200, 4)])
def test_best_of_vocabulary_parts_equals_the_whole_vocabulary(
    vocab_size: int, num_parts: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Some parts begin at multiples of 4, others do not."""
    settings = [{"temperature": t} for t in (1.0, 0.0, 0.3, 2.5, 0.0, 1.0)]
    logits = random_logits(6, vocab_size, 2.0).to(dtype).to(device)
    logits[3, -1] = torch.nan
    logits[4] = -torch.inf
    columns, rows = columns_of(settings, device), torch.arange(6, device=device)
    positions = rows + 5
    width = -(-vocab_size // num_parts)
    pairs = torch.stack(
        [
            sampling.best_of_part(part, columns, positions, rows, first)
            for first, part in zip(range(0, vocab_size, width), logits.split(width, 1), strict=True)
        ]
    )
    wanted, is_valid = sampling.sample(logits, columns, positions, rows, has_filters=False)
    found, has_any = best_of_parts(pairs)
    assert torch.equal(found, wanted) and torch.equal(has_any, is_valid)
    assert has_any.tolist() == [True, True, True, False, False, True]
