"""Apply penalties for tokens that occurred before: two launches over the tokens that rows hold.

The first launch counts each row's tokens, in a word per token of the vocabulary. The second changes
the logit of each counted token once: the first position to take the word leaves 0. So the counts
are all 0 again afterwards, and no launch clears or reads a vocabulary.

Expected on an H200, not measured: bound by scattered accesses, about 4 sectors of 32 bytes per
token and launch. 256 rows of 4,096 tokens take some 50 us, less in the L2 cache.

Shape legend: R rows, P penalised rows, B rows of the token buffers, V vocabulary, M known tokens of
a row (padded).
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel
from quire.ops.sampling.penalties import Penalties

_BLOCK = 512
_IN_PROMPT = tl.constexpr(1 << 30)


@triton.jit
def _place(p, tokens_ptr, rows_ptr, length_ptr, row_stride, HAS_ROWS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Return the positions of a block, which of them are known, and their tokens."""
    row = p
    if HAS_ROWS:
        row = tl.load(rows_ptr + p).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_known = at < tl.load(length_ptr + p)
    return at, is_known, tl.load(tokens_ptr + row * row_stride + at, mask=is_known, other=0)


@kernel()
def _count(
    counts_ptr, tokens_ptr, rows_ptr, length_ptr, prompt_len_ptr, vocab_size, row_stride,
    HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64)
    at, is_known, tokens = _place(p, tokens_ptr, rows_ptr, length_ptr, row_stride, HAS_ROWS, BLOCK)
    words = counts_ptr + p * vocab_size + tokens
    is_output = at >= tl.load(prompt_len_ptr + p)
    one = tl.full((BLOCK,), 1, tl.int32)
    tl.atomic_add(words, one, mask=is_known & is_output, sem="relaxed")
    in_prompt = tl.full((BLOCK,), _IN_PROMPT, tl.int32)
    tl.atomic_or(words, in_prompt, mask=is_known & (is_output == 0), sem="relaxed")


@kernel()
def _change(
    logits_ptr, which_ptr, counts_ptr, tokens_ptr, rows_ptr, length_ptr,
    presence_ptr, frequency_ptr, repetition_ptr, vocab_size, row_stride, logits_stride,
    HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64)
    _, is_known, tokens = _place(p, tokens_ptr, rows_ptr, length_ptr, row_stride, HAS_ROWS, BLOCK)
    zero = tl.zeros((BLOCK,), tl.int32)
    words = counts_ptr + p * vocab_size + tokens
    word = tl.atomic_xchg(words, zero, mask=is_known, sem="relaxed")
    is_first = is_known & (word != 0)
    count = (word & (_IN_PROMPT - 1)).to(tl.float32)
    out = logits_ptr + tl.load(which_ptr + p).to(tl.int64) * logits_stride + tokens
    value = tl.load(out, mask=is_first, other=0.0)
    repetition = tl.load(repetition_ptr + p)
    value = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
    value -= tl.load(frequency_ptr + p) * count
    value -= tl.load(presence_ptr + p) * (count > 0).to(tl.float32)
    tl.store(out, value, mask=is_first)


def apply_penalties(
    logits_RV: torch.Tensor,
    which_P: torch.Tensor,
    tokens_BM: torch.Tensor,
    lengths_P: torch.Tensor,
    prompt_lens_P: torch.Tensor,
    penalties: Penalties,
    rows_P: torch.Tensor | None = None,
    counts_PV: torch.Tensor | None = None,
) -> None:
    """Compute `quire.ops.sampling.penalties.apply_penalties` for logits [R, V], bit for bit;
    lengths may be 0.

    rows_P: integers, the row of tokens_BM of each penalised row, so that token buffers need not be
    gathered (row p if absent). counts_PV: int32, contiguous, at least P rows, all 0 before and
    after. A caller that reuses it need not clear it.
    """
    num_rows, vocab_size = len(which_P), logits_RV.shape[-1]
    if num_rows == 0 or tokens_BM.shape[-1] == 0:
        return
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(-1) == 1
    assert tokens_BM.stride(-1) == 1
    if counts_PV is None:
        counts_PV = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=logits_RV.device)
    grid = num_rows, triton.cdiv(tokens_BM.shape[-1], _BLOCK)
    arguments = {
        "counts_ptr": counts_PV,
        "tokens_ptr": tokens_BM,
        "rows_ptr": which_P if rows_P is None else rows_P,
        "length_ptr": lengths_P,
        "vocab_size": vocab_size,
        "row_stride": tokens_BM.stride(0),
        "HAS_ROWS": rows_P is not None,
        "BLOCK": _BLOCK,
    }
    _count[grid](**arguments, prompt_len_ptr=prompt_lens_P)
    _change[grid](
        **arguments,
        logits_ptr=logits_RV,
        which_ptr=which_P,
        presence_ptr=penalties.presence,
        frequency_ptr=penalties.frequency,
        repetition_ptr=penalties.repetition,
        logits_stride=logits_RV.stride(0),
        enable_fp_fusion=False,  # rounded after each operation, as in the reference
    )


_SIGNATURE = {
    "logits_ptr": "*fp32",
    "which_ptr": "*i64",
    "counts_ptr": "*i32",
    "rows_ptr": "*i64",
    "length_ptr": "*i64",
    "prompt_len_ptr": "*i64",
    "presence_ptr": "*fp32",
    "frequency_ptr": "*fp32",
    "repetition_ptr": "*fp32",
    "vocab_size": "i32",
    "row_stride": "i64",
    "logits_stride": "i64",
}

CONFIGS = [
    Config(
        kernel,
        {name: kind for name, kind in signature.items() if name in kernel.arg_names},
        {"HAS_ROWS": has_rows, "BLOCK": _BLOCK},
    )
    for kernel in (_count, _change)
    for has_rows in (False, True)
    for signature in (_SIGNATURE | {"tokens_ptr": "*i32"},)
]
