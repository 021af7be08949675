"""Penalties on the device give the reference's logits, to the last bit."""

import pytest
import torch

from quire.ops.kernels.sampling import penalties
from quire.ops.sampling import penalties as reference
from quire.ops.sampling.penalties import Penalties
from tests.support.kernels.sampling_oracle import random_logits

LENGTHS = [29, 5, 12, 1, 20, 7]
PROMPT_LENS = [10, 5, 0, 1, 19, 3]


def tokens_of(num_rows: int, width: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, vocab_size, (num_rows, width), generator=generator)
    return tokens.to(torch.int32)


def columns_of(count: int, device: torch.device) -> Penalties:
    generator = torch.Generator().manual_seed(8)
    drawn = torch.rand(3, count, generator=generator).to(device)
    return Penalties(drawn[0] * 2 - 1, drawn[1] * 2 - 1, drawn[2] + 0.5)


@pytest.mark.parametrize("vocab_size", [1, 40, 1001])
def test_penalties_equal_the_reference(vocab_size: int, device: torch.device) -> None:
    logits = random_logits(7, vocab_size, 2.0).to(device)
    tokens = tokens_of(6, 30, vocab_size)
    tokens[:, 29] = -1  # beyond every row's length
    tokens = tokens.to(device)
    lengths, prompt_lens = (torch.tensor(x, device=device) for x in (LENGTHS, PROMPT_LENS))
    which = torch.tensor([5, 0, 2, 6, 4, 3], device=device)
    expected = logits.clone()
    arguments = (which, tokens, lengths, prompt_lens, columns_of(6, device))
    reference.apply_penalties(expected, *arguments)
    penalties.apply_penalties(logits, *arguments)
    assert torch.equal(logits, expected)


def test_penalties_take_wider_buffers_and_clear_the_given_counts(device: torch.device) -> None:
    """Rows have more than a block of tokens or none. Logits are a slice of a wider tensor."""
    buffers = tokens_of(9, 1500, 50).to(device)
    rows = torch.tensor([7, 0, 3], device=device)
    lengths = torch.tensor([1300, 0, 600], device=device)
    prompt_lens = torch.tensor([700, 0, 100], device=device)
    wide = random_logits(4, 80, 2.0).to(device)
    logits, which = wide[:, 20:70], torch.tensor([1, 2, 3], device=device)
    counts = torch.zeros(5, 50, dtype=torch.int32, device=device)
    columns = columns_of(3, device)
    expected = wide.clone()
    part = logits.contiguous()
    some = torch.tensor([0, 2], device=device)
    reference.apply_penalties(
        part, which[some], buffers[rows[some]], lengths[some], prompt_lens[some],
        Penalties(*(column[some] for column in vars(columns).values())),
    )  # fmt: skip
    expected[:, 20:70] = part
    penalties.apply_penalties(logits, which, buffers, lengths, prompt_lens, columns, rows, counts)
    assert torch.equal(wide, expected)
    assert not counts.any()


def test_no_penalised_rows_leave_logits_unchanged(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    logits = random_logits(2, 9, 1.0).to(device)
    tokens = torch.empty(0, 4, dtype=torch.int32, device=device)
    penalties.apply_penalties(logits, none, tokens, none, none, columns_of(0, device))
    assert torch.equal(logits.cpu(), random_logits(2, 9, 1.0))
