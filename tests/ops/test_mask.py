"""Token masks set forbidden logits to -infinity and keep the bits of the others."""

import numpy as np
import pytest
import torch

from quire.ops.host import native
from quire.ops.sampling.logit_edits import RowMasks, apply_masks, apply_masks_reference
from tests.support.kernels.sampling_oracle import random_logits

PATHS = [pytest.param(apply_masks_reference, id="torch")]
if native.core() is not None:
    PATHS.append(pytest.param(apply_masks, id="core"))


def words_of(allowed: list[set[int]], num_words: int) -> torch.Tensor:
    """Return words whose bits are 1 for allowed tokens and else 0."""
    bits = np.zeros((len(allowed), num_words * 32), bool)
    for row, tokens in zip(bits, allowed, strict=True):
        row[list(tokens)] = True
    words = np.packbits(bits, axis=1, bitorder="little").view("<u4")
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def random_allowed(num_rows: int, vocab_size: int, num_words: int) -> list[set[int]]:
    """Return some, few, none or all of the tokens for each row."""
    generator, size = np.random.default_rng(vocab_size), min(vocab_size, 32 * num_words)
    shares = [0.5, 0.02, 0.0, 1.0, 0.98]
    return [
        set(np.flatnonzero(generator.random(size) < shares[n % 5]).tolist())
        for n in range(num_rows)
    ]


@pytest.mark.parametrize("apply", PATHS)
@pytest.mark.parametrize(
    ("vocab_size", "num_words"), [(1, 1), (31, 1), (32, 1), (97, 4), (97, 3), (97, 5), (4000, 125)]
)
def test_only_forbidden_tokens_get_minus_infinity(apply, vocab_size: int, num_words: int) -> None:
    logits = random_logits(8, vocab_size, 2.0)
    logits[5, 0], logits[2, -1] = torch.nan, -0.0
    places = [5, 0, 7, 2, 3]
    allowed = random_allowed(5, vocab_size, num_words)
    words = words_of(allowed, num_words)
    if 32 * num_words > vocab_size:
        words[:, -1] |= -1 << (vocab_size % 32 or 31) if vocab_size // 32 == num_words - 1 else -1
    expected = logits.clone()
    for place, tokens in zip(places, allowed, strict=True):
        forbidden = [token for token in range(vocab_size) if token not in tokens]
        expected[place, forbidden] = -torch.inf
    apply(logits, RowMasks(torch.tensor(places, dtype=torch.int32), words))
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("apply", PATHS)
def test_masks_of_ones_change_no_bits(apply) -> None:
    logits = random_logits(3, 1001, 2.0)
    logits[1, 7], logits[1, 8], logits[1, 9] = torch.nan, torch.inf, -0.0
    before = logits.clone()
    ones = torch.full((2, 32), -1, dtype=torch.int32)
    apply(logits, RowMasks(torch.tensor([1, 2], dtype=torch.int32), ones))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
    apply(logits, RowMasks(torch.zeros(0, dtype=torch.int32), ones[:0]))
    assert torch.equal(logits.view(torch.int32), before.view(torch.int32))
