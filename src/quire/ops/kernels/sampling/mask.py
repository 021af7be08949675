"""Apply token masks: write -infinity where a bit is 0, without reading the logits.

Expected on an H200, not measured: bound by writing, 40 us for 256 rows of 151,936 float32 logits of
which nearly all are forbidden.

Shape legend: N rows of logits, M masks, V vocabulary, W words.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel
from quire.ops.sampling.logit_edits import BITS, RowMasks

_WORDS = 128  # words of a program

_MINUS_INFINITY = tl.constexpr(float("-inf"))


@kernel()
def _mask(
    logits_ptr, places_ptr, words_ptr, vocab_size, num_words, logits_stride, words_stride,
    BITS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    place = tl.load(places_ptr + m).to(tl.int64)
    if place >= 0:
        at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
        words = tl.load(words_ptr + m * words_stride + at, mask=at < num_words, other=0)
        bit = tl.arange(0, BITS)
        ids = at[:, None] * BITS + bit[None, :]
        is_forbidden = ((words[:, None] >> bit[None, :]) & 1) == 0
        out = logits_ptr + place * logits_stride + ids
        tl.store(out, _MINUS_INFINITY, mask=is_forbidden & (ids < vocab_size))


def apply_masks(logits_NV: torch.Tensor, masks: RowMasks) -> None:
    """Apply masks to logits [N, V], as `quire.ops.sampling.logit_edits.apply_masks_reference` does.
    Masks with place -1 are skipped, since a captured graph has room for as many masks as rows."""
    vocab_size, num_masks = logits_NV.shape[-1], len(masks.places)
    if num_masks == 0:
        return
    assert logits_NV.stride(-1) == 1 and masks.words.stride(-1) == 1
    _mask[(num_masks, triton.cdiv(vocab_size, _WORDS * BITS))](
        logits_NV,
        masks.places,
        masks.words,
        vocab_size,
        masks.words.shape[-1],
        logits_NV.stride(0),
        masks.words.stride(0),
        BITS=BITS,
        WORDS=_WORDS,
        num_warps=4,
    )


_SIGNATURE = {
    "places_ptr": "*i32",
    "words_ptr": "*i32",
    "vocab_size": "i32",
    "num_words": "i32",
    "logits_stride": "i64",
    "words_stride": "i64",
}

CONFIGS = [
    Config(
        _mask,
        {"logits_ptr": kind} | _SIGNATURE,
        {"BITS": BITS, "WORDS": _WORDS},
        divisible=("vocab_size", "logits_stride"),
    )
    for kind in ("*bf16", "*fp32")
]
