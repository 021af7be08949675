"""Philox: the published test vectors, and the same bits from torch and from the C++ core."""

import math

import pytest
import torch

from quire.ops.host import native
from quire.ops.sampling import philox

# Counter, key, result: from the test vectors of the Random123 library.
VECTORS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

needs_core = pytest.mark.skipif(native.core() is None, reason="the C++ core was not built")


def streams(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    seeds = torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator)
    sample_index = torch.randint(0, 50, (num_rows,), generator=generator)
    positions = torch.randint(0, 2**31, (num_rows,), generator=generator)
    return seeds, sample_index, positions


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_torch_gives_the_known_answers(counter, key, expected):
    counter_words = tuple(torch.tensor([word]) for word in counter)
    key_words = tuple(torch.tensor([word]) for word in key)
    words = philox.philox_words(counter_words, key_words)
    assert tuple(int(word) for word in words) == expected


@needs_core
@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_core_gives_the_known_answers(counter, key, expected):
    assert tuple(native.core().philox_words(counter, key)) == expected


@needs_core
@pytest.mark.parametrize("vocab_size", [1, 3, 4, 255, 256, 257, 1000, 4099])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_core_has_the_same_bits(num_rows, vocab_size):
    expected = philox.uniform_reference(*streams(num_rows), vocab_size)
    assert torch.equal(philox.uniform(*streams(num_rows), vocab_size), expected)


@pytest.mark.parametrize("uniform_at", [philox.uniform_at, philox.uniform_at_reference])
def test_noise_of_some_tokens_equals_that_of_all_tokens(uniform_at):
    noise = philox.uniform(*streams(5), 1000)
    token_ids = torch.randint(0, 1000, (5, 37), generator=torch.Generator().manual_seed(1))
    assert torch.equal(uniform_at(*streams(5), token_ids), noise.gather(1, token_ids))


def test_noise_of_a_token_is_a_word_of_its_counter():
    """Token 4 c + w is word w of the counter (c, position, sample index, 0) under the seed."""
    seed, sample_index, position, token_id = -2, 3, 9, 4 * 17 + 2
    counter = tuple(torch.tensor([word]) for word in (17, position, sample_index, 0))
    key = (torch.tensor([0xFFFFFFFE]), torch.tensor([0xFFFFFFFF]))
    bits = philox.philox_words(counter, key)[2]
    arguments = (torch.tensor([value]) for value in (seed, sample_index, position))
    assert philox.uniform(*arguments, 100)[0, token_id] == philox.to_unit(bits)[0]


def test_unit_interval_is_open_and_fine_near_zero():
    bits = torch.tensor([0, 1, 2**24, 2**31, 2**32 - 1])
    unit = philox.to_unit(bits)
    assert unit.tolist() == [2.0**-33, 1.5 * 2.0**-32, 2.0**-8, 0.5, 1 - 2.0**-24]


def test_noise_is_uniform_and_streams_are_independent():
    noise = philox.uniform(*streams(64), 4096).double()
    count = noise.numel()
    assert abs(noise.mean() - 0.5) < 4 * math.sqrt(1 / 12 / count)
    assert abs(noise.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / count)
    correlation = torch.corrcoef(noise)[~torch.eye(64, dtype=torch.bool)]
    assert correlation.abs().max() < 6 / math.sqrt(4096)


@pytest.mark.parametrize("changed", range(3))
def test_each_argument_changes_the_noise(changed):
    arguments = [torch.tensor([5]), torch.tensor([5]), torch.tensor([5])]
    before = philox.uniform(*arguments, 64)
    arguments[changed] = torch.tensor([6])
    assert not torch.equal(philox.uniform(*arguments, 64), before)


def test_row_does_not_depend_on_other_rows():
    together = philox.uniform(*streams(6), 999)
    for row in range(6):
        alone = philox.uniform(*(stream[row : row + 1] for stream in streams(6)), 999)
        assert torch.equal(alone[0], together[row])


@pytest.mark.gpu
def test_cuda_has_the_same_bits():
    expected = philox.uniform(*streams(4), 5003)
    on_device = philox.uniform(*(stream.cuda() for stream in streams(4)), 5003)
    assert torch.equal(on_device.cpu(), expected)
