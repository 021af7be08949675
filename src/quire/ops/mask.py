"""Which tokens a row may choose, as bits: what they do not allow gets a logit of -infinity.

Bit t % 32 of word t // 32 stands for token t. Bits beyond the vocabulary are not looked at; tokens
beyond the words are forbidden. What is allowed keeps its logit, to the last bit.

Shape legend: N rows of logits, M masked ones of them, V vocabulary, W words.
"""

from dataclasses import dataclass

import torch

from quire.ops import native
from quire.ops.gpu import kernels_for
from quire.ops.threads import num_threads

BITS = 32


@dataclass(frozen=True)
class RowMasks:
    """places: int32 [M], distinct, which rows of the logits they are for; words: int32 [M, W].
    Both contiguous and on the logits' device. For the kernels -1 is no place."""

    places: torch.Tensor
    words: torch.Tensor


def num_words(vocab_size: int) -> int:
    """Return how many words a vocabulary takes."""
    return -(-vocab_size // BITS)


def allowed_reference(words_MW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return as bool [M, V] what the words allow."""
    bits_B = torch.arange(BITS, device=words_MW.device)
    bits_MV = (words_MW[:, :, None] >> bits_B & 1).bool().flatten(1)
    return torch.nn.functional.pad(bits_MV, (0, vocab_size - bits_MV.shape[1]))


def apply_masks_reference(logits_NV: torch.Tensor, masks: RowMasks) -> None:
    """The torch path of `apply_masks`, on any device."""
    places_M = masks.places.long()
    allowed_MV = allowed_reference(masks.words, logits_NV.shape[-1])
    masked_MV = logits_NV.index_select(0, places_M).masked_fill_(~allowed_MV, -torch.inf)
    logits_NV.index_copy_(0, places_M, masked_MV)


def apply_masks(logits_NV: torch.Tensor, masks: RowMasks) -> None:
    """Forbid in place what the masks do not allow. logits: contiguous; float32 on a CPU."""
    if kernels := kernels_for(logits_NV, "mask"):
        kernels.apply_masks(logits_NV, masks)
        return
    core = native.core_for(logits_NV)
    if core is None:
        apply_masks_reference(logits_NV, masks)
        return
    core.apply_masks(
        native.address(logits_NV, torch.float32),
        native.address(masks.places, torch.int32),
        native.address(masks.words, torch.int32),
        len(masks.places),
        logits_NV.shape[-1],
        masks.words.shape[-1],
        num_threads(),
    )
