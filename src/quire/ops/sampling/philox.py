"""Randomness as a pure function: noise for a token id from (seed, sample index, position).

Philox4x32-10 (Salmon et al., 2011) turns a counter of four 32-bit words and a key of two into four
random words. There is no generator object; torch and C++ give the same bits.

    key      [ seed, low 32 bits | seed, high 32 bits ]
    counter  [ token id // 4 | position | sample index | domain ]
    word w of the result is the noise of token id 4 * (token id // 4) + w

`position` is the index that the sampled token will have in its sequence. `domain` names the use of
the numbers, so that two uses never share one. Only the low 32 bits of position and sample index
count.

Shape legend: R rows, K chosen token ids of a row, V vocabulary, C counters.
"""

import torch

from quire.ops.host import native
from quire.ops.host.threads import num_threads

DOMAIN_SAMPLING = 0
DOMAIN_XTC = 1

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-24

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _multiply(multiplier: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return high and low 32 bits of a 32 x 32 bit product; in halves, since int64 holds only 63
    bits."""
    low_half, high_half = multiplier & 0xFFFF, multiplier >> 16
    low = word * low_half
    middle = word * high_half + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox_words(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Compute Philox4x32-10. All tensors are int64, hold unsigned 32-bit words and broadcast
    together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        a_high, a_low = _multiply(_MULTIPLIERS[0], c0)
        b_high, b_low = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = b_high ^ c1 ^ k0, b_low, a_high ^ c3 ^ k1, a_low
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def to_unit(words: torch.Tensor) -> torch.Tensor:
    """Convert 32 random bits, int64 [...], to float32 in (0, 1).

    Small values keep all 32 bits, since the token with the smallest -log(1 - u) / p is chosen. With
    24 bits the tokens of a large vocabulary would have equal noise. Ones are rounded down to below
    one.
    """
    return ((words.float() + 0.5) * 2.0**-32).clamp_max(_BELOW_ONE)


def _key(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return seeds & _MASK, (seeds >> 32) & _MASK


def uniform_reference(
    seeds_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    positions_R: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Compute `uniform` with torch, on any device: float32 [R, V]."""
    num_counters = (vocab_size + 3) // 4
    counters_1C = torch.arange(num_counters, device=seeds_R.device)[None]
    counter = (
        counters_1C,
        positions_R[:, None] & _MASK,
        sample_index_R[:, None] & _MASK,
        torch.full_like(counters_1C, DOMAIN_SAMPLING),
    )
    words = philox_words(counter, _key(seeds_R[:, None]))
    noise_RC4 = to_unit(torch.stack(words, dim=-1))
    return noise_RC4.flatten(1)[:, :vocab_size].contiguous()


def uniform(
    seeds_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    positions_R: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """Return noise in (0, 1) for every token id: float32 [R, V]. The tensors are int64 [R]."""
    core = native.core_for(seeds_R)
    if core is None:
        return uniform_reference(seeds_R, sample_index_R, positions_R, vocab_size)
    seeds_R, sample_index_R = seeds_R.contiguous(), sample_index_R.contiguous()
    positions_R = positions_R.contiguous()
    out_RV = torch.empty(len(seeds_R), vocab_size)
    core.philox_uniform(
        native.address(out_RV, torch.float32),
        len(seeds_R),
        vocab_size,
        native.address(seeds_R, torch.int64),
        native.address(sample_index_R, torch.int64),
        native.address(positions_R, torch.int64),
        num_threads(),
    )
    return out_RV


def uniform_at_reference(
    seeds_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    positions_R: torch.Tensor,
    token_ids_RK: torch.Tensor,
    domain: int = DOMAIN_SAMPLING,
) -> torch.Tensor:
    """Compute `uniform_at` with torch, on any device and of any domain: float32 [R, K]."""
    counter = (
        token_ids_RK >> 2,
        positions_R[:, None] & _MASK,
        sample_index_R[:, None] & _MASK,
        torch.full_like(token_ids_RK, domain),
    )
    words = torch.stack(philox_words(counter, _key(seeds_R[:, None])), dim=-1)
    return to_unit(words.gather(-1, (token_ids_RK & 3)[..., None])[..., 0])


def uniform_at(
    seeds_R: torch.Tensor,
    sample_index_R: torch.Tensor,
    positions_R: torch.Tensor,
    token_ids_RK: torch.Tensor,
) -> torch.Tensor:
    """Return noise of the given token ids only: float32 [R, K], with the bits that `uniform` has
    there."""
    core = native.core_for(seeds_R)
    if core is None:
        return uniform_at_reference(seeds_R, sample_index_R, positions_R, token_ids_RK)
    seeds_R, sample_index_R = seeds_R.contiguous(), sample_index_R.contiguous()
    positions_R, token_ids_RK = positions_R.contiguous(), token_ids_RK.contiguous()
    out_RK = torch.empty(token_ids_RK.shape)
    core.philox_uniform_at(
        native.address(out_RK, torch.float32),
        native.address(token_ids_RK, torch.int64),
        out_RK.shape[0],
        out_RK.shape[1],
        native.address(seeds_R, torch.int64),
        native.address(sample_index_R, torch.int64),
        native.address(positions_R, torch.int64),
    )
    return out_RK
