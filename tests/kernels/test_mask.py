"""Token masks on the device give the reference's logits, to the last bit."""

import pytest
import torch

from quire.ops.kernels.sampling import mask
from quire.ops.sampling import logit_edits as reference
from quire.ops.sampling.logit_edits import RowMasks
from tests.ops.test_mask import random_allowed, words_of
from tests.support.kernels.sampling_oracle import random_logits


@pytest.mark.parametrize(
    ("vocab_size", "num_words"), [(1, 1), (31, 1), (97, 4), (97, 3), (97, 6), (9000, 282)]
)
def test_masks_equal_the_reference(
    vocab_size: int, num_words: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Logits are a slice of a wider tensor; padding has place -1."""
    wide = random_logits(8, vocab_size + 9, 2.0).to(dtype).to(device)
    places = torch.tensor([5, 0, 7, 2, 3], dtype=torch.int32, device=device)
    words = words_of(random_allowed(5, vocab_size, num_words), num_words).to(device)
    expected = wide.clone()
    part = expected[:, 4:-5].contiguous()
    reference.apply_masks_reference(part, RowMasks(places, words))
    expected[:, 4:-5] = part
    more = torch.full((2,), -1, dtype=torch.int32, device=device)
    padded = RowMasks(torch.cat((places, more)), torch.cat((words, words[:2] * 0)))
    mask.apply_masks(wide[:, 4:-5], padded)
    assert torch.equal(wide, expected)
