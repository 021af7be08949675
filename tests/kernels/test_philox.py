"""Philox on the device gives the bits of torch's, and Gumbel noise close to torch's."""

import pytest
import torch
import triton
import triton.language as tl

from quire.ops.kernels.sampling import philox
from quire.ops.sampling import choice as sampling
from quire.ops.sampling import philox as reference
from tests.ops.test_philox import VECTORS, streams


@triton.jit
def _known_answer(out_ptr, in_ptr):
    c0, c1, c2, c3, k0, k1 = (
        tl.load(in_ptr + 0).to(tl.uint32),
        tl.load(in_ptr + 1).to(tl.uint32),
        tl.load(in_ptr + 2).to(tl.uint32),
        tl.load(in_ptr + 3).to(tl.uint32),
        tl.load(in_ptr + 4).to(tl.uint32),
        tl.load(in_ptr + 5).to(tl.uint32),
    )
    w0, w1, w2, w3 = philox.philox_words(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + 0, w0.to(tl.int64))
    tl.store(out_ptr + 1, w1.to(tl.int64))
    tl.store(out_ptr + 2, w2.to(tl.int64))
    tl.store(out_ptr + 3, w3.to(tl.int64))


@triton.jit
def _gumbels(exact_ptr, rough_ptr, uniform_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    noise = tl.load(uniform_ptr + at)
    tl.store(exact_ptr + at, philox.gumbel(noise))
    tl.store(rough_ptr + at, philox.rough_gumbel(noise))


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_known_answers(counter, key, expected, device: torch.device) -> None:
    words = torch.tensor([*counter, *key], device=device)
    out = torch.empty(4, dtype=torch.int64, device=device)
    _known_answer[(1,)](out, words)
    assert tuple(out.tolist()) == expected


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 1000, 1023, 4099])
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_uniform_noise_has_the_same_bits_as_torchs(
    num_rows: int, vocab_size: int, device: torch.device
) -> None:
    where = [stream.to(device) for stream in streams(num_rows)]
    expected = reference.uniform_reference(*where, vocab_size)
    assert torch.equal(philox.uniform(*where, vocab_size), expected)


def test_positions_and_indices_beyond_32_bits_wrap(device: torch.device) -> None:
    where = [torch.tensor([x], device=device) for x in (-1, 2**32 + 3, 2**31 + 2**33)]
    assert torch.equal(philox.uniform(*where, 100), reference.uniform_reference(*where, 100))


def test_noise_of_some_tokens_equals_that_of_all_tokens(device: torch.device) -> None:
    where = [stream.to(device) for stream in streams(5)]
    token_ids = torch.randint(0, 262_144, (5, 37), generator=torch.Generator().manual_seed(1))
    expected = reference.uniform_at_reference(*where, token_ids.to(device))
    assert torch.equal(philox.uniform_at(*where, token_ids.to(device)), expected)


def test_gumbel_noise_is_close_to_torchs(device: torch.device) -> None:
    """Also at the ends of the interval, where a plain log(1 - u) loses all digits."""
    bits = torch.randint(0, 2**32, (2000,), generator=torch.Generator().manual_seed(5))
    small = 2 ** (torch.arange(40) * 0.8)
    bits = torch.cat((bits, small.long(), torch.tensor([0, 1, 2, 2**32 - 1, 2**32 - 500, 2**28])))
    noise = torch.full((2048,), 0.5)
    noise[: len(bits)] = reference.to_unit(bits)
    noise = noise.to(device)
    exact = torch.empty(2048, dtype=torch.float64, device=device)
    rough = torch.empty(2048, device=device)
    _gumbels[(1,)](exact, rough, noise, BLOCK=2048)
    expected = sampling.gumbel(noise)
    assert (exact - expected).abs().max() < 4e-15
    assert (rough.double() - expected).abs().max() < 2e-5
