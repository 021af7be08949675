"""Edit logits as requests specify: allowed tokens, bad words, min_tokens, biases.

Two launches do for all rows of a step what `quire.ops.sampling.logit_edits` does row by row, in its
order. The first makes the float32 copy of the logits that is edited; for rows with allowed tokens
it copies no logits. The second has one program per row, which applies the row's lists one after
another. The lists of all rows are in one table, made when such a request starts and not in each
step.

Expected on an H200, not measured: bound by the copy, 54 us for 256 rows of 151,936 bfloat16 logits.
Lists of hundreds of tokens add the time of a launch.

Shape legend: N rows of the step, B rows of the token buffers, S rows of the table, M tokens of a
row's buffer, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from quire.ops.kernels.launch import Config, kernel
from quire.ops.sampling.logit_edits import (
    ALLOWED,
    BIASES,
    LONGEST,
    MIN_TOKENS,
    SPAN,
    STOPS,
    WORDS,
    EditTable,
)

_COPY_BLOCK = 4096
_BLOCK = 128

_MINUS_INFINITY = tl.constexpr(float("-inf"))


@kernel()
def _copy(
    out_ptr, raw_ptr, slot_ptr, spans_ptr, vocab_size, raw_stride,
    SPAN: tl.constexpr, ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    slot = tl.load(slot_ptr + n).to(tl.int64)
    num_allowed = tl.load(spans_ptr + slot * SPAN + ALLOWED + 1, mask=slot >= 0, other=0)
    is_open = num_allowed == 0
    x = tl.load(raw_ptr + n * raw_stride + ids, mask=inside & is_open, other=_MINUS_INFINITY)
    tl.store(out_ptr + n * vocab_size + ids, x.to(tl.float32), mask=inside)


@triton.jit
def _mask_bad_words(
    out_ptr, entries_ptr, first, num_words, longest, tokens_ptr, length, prompt_len,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask the last token of each word whose other tokens are the output's last ones."""
    num_places = longest - 1
    for start in range(0, num_words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < num_words
        last = tl.load(entries_ptr + first + word, mask=inside, other=0)
        prefix_len = tl.load(entries_ptr + first + num_words + word, mask=inside, other=0)
        matches = inside
        prefix_ptr = entries_ptr + first + 2 * num_words + word * num_places
        for i in range(num_places):
            at = length - num_places + i
            token = tl.load(tokens_ptr + at, mask=at >= prompt_len, other=-1).to(tl.int32)
            expected = tl.load(prefix_ptr + i, mask=inside, other=0)
            matches = matches & ((i < num_places - prefix_len) | (expected == token))
        tl.store(out_ptr + last, _MINUS_INFINITY, mask=matches)


@kernel()
def _edit(
    out_ptr, raw_ptr, slot_ptr, spans_ptr, entries_ptr, values_ptr, tokens_ptr, rows_ptr,
    length_ptr, prompt_len_ptr, vocab_size, raw_stride, row_stride,
    SPAN: tl.constexpr, ALLOWED: tl.constexpr, WORDS: tl.constexpr, STOPS: tl.constexpr,
    BIASES: tl.constexpr, MIN_TOKENS: tl.constexpr, LONGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + n).to(tl.int64)
    if slot >= 0:
        spans_ptr += slot * SPAN
        out_ptr += n * vocab_size
        raw_ptr += n * raw_stride
        first, count = tl.load(spans_ptr + ALLOWED), tl.load(spans_ptr + ALLOWED + 1)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            token = tl.load(entries_ptr + first + at, mask=at < count, other=0)
            x = tl.load(raw_ptr + token, mask=at < count, other=0.0)
            tl.store(out_ptr + token, x.to(tl.float32), mask=at < count)
        tl.debug_barrier()

        length, prompt_len = tl.load(length_ptr + n), tl.load(prompt_len_ptr + n)
        first, count = tl.load(spans_ptr + WORDS), tl.load(spans_ptr + WORDS + 1)
        row = tl.load(rows_ptr + n).to(tl.int64)
        _mask_bad_words(
            out_ptr, entries_ptr, first, count, tl.load(spans_ptr + LONGEST),
            tokens_ptr + row * row_stride, length, prompt_len, BLOCK,
        )  # fmt: skip
        first, count = tl.load(spans_ptr + STOPS), tl.load(spans_ptr + STOPS + 1)
        count = tl.where(length - prompt_len < tl.load(spans_ptr + MIN_TOKENS), count, 0)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            token = tl.load(entries_ptr + first + at, mask=at < count, other=0)
            tl.store(out_ptr + token, _MINUS_INFINITY, mask=at < count)
        tl.debug_barrier()

        first, count = tl.load(spans_ptr + BIASES), tl.load(spans_ptr + BIASES + 1)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            token = tl.load(entries_ptr + first + at, mask=at < count, other=0)
            bias = tl.load(values_ptr + first + at, mask=at < count, other=0.0)
            x = tl.load(out_ptr + token, mask=at < count, other=0.0)
            tl.store(out_ptr + token, x + bias, mask=at < count)


def edit_logits(
    raw_NV: torch.Tensor,
    table: EditTable,
    slots_N: torch.Tensor,
    tokens_BM: torch.Tensor,
    rows_N: torch.Tensor,
    lengths_N: torch.Tensor,
    prompt_lens_N: torch.Tensor,
) -> torch.Tensor:
    """Return the logits with each row's edits: a new float32 [N, V].

    raw_NV: float32, float16 or bfloat16. slots_N: int32, each row's index in the table, or -1 for
    no edits. tokens_BM: integers, the token buffers. rows_N: each row's index in tokens_BM.
    lengths_N, prompt_lens_N: int64, known tokens and prompt tokens of each row. A captured graph
    reads the table at its addresses, and lists of any length there.
    """
    num_rows, vocab_size = raw_NV.shape
    out_NV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=raw_NV.device)
    if num_rows == 0:
        return out_NV
    assert tokens_BM.stride(-1) == 1
    if raw_NV.stride(-1) != 1:
        raw_NV = raw_NV.contiguous()
    arguments = {
        "out_ptr": out_NV,
        "raw_ptr": raw_NV,
        "slot_ptr": slots_N,
        "spans_ptr": table.spans,
        "vocab_size": vocab_size,
        "raw_stride": raw_NV.stride(0),
        "SPAN": SPAN,
        "ALLOWED": ALLOWED,
    }
    grid = num_rows, triton.cdiv(vocab_size, _COPY_BLOCK)
    _copy[grid](**arguments, BLOCK=_COPY_BLOCK, num_warps=4)
    _edit[(num_rows,)](
        **arguments,
        **_COLUMNS,
        entries_ptr=table.entries,
        values_ptr=table.values,
        tokens_ptr=tokens_BM,
        rows_ptr=rows_N,
        length_ptr=lengths_N,
        prompt_len_ptr=prompt_lens_N,
        row_stride=tokens_BM.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out_NV


_COLUMNS = {
    "WORDS": WORDS,
    "STOPS": STOPS,
    "BIASES": BIASES,
    "MIN_TOKENS": MIN_TOKENS,
    "LONGEST": LONGEST,
}
_SIGNATURE = {
    "out_ptr": "*fp32",
    "slot_ptr": "*i32",
    "spans_ptr": "*i32",
    "entries_ptr": "*i32",
    "values_ptr": "*fp32",
    "tokens_ptr": "*i32",
    "rows_ptr": "*i64",
    "length_ptr": "*i64",
    "prompt_len_ptr": "*i64",
    "vocab_size": "i32",
    "raw_stride": "i64",
    "row_stride": "i64",
}

CONFIGS = [
    Config(
        kernel,
        {name: of[name] for name in kernel.arg_names if name in of},
        constants,
        divisible=("vocab_size", "raw_stride"),
    )
    for kind in ("*bf16", "*fp32")
    for of in (_SIGNATURE | {"raw_ptr": kind},)
    for kernel, constants in (
        (_copy, {"SPAN": SPAN, "ALLOWED": ALLOWED, "BLOCK": _COPY_BLOCK}),
        (_edit, _COLUMNS | {"SPAN": SPAN, "ALLOWED": ALLOWED, "BLOCK": _BLOCK}),
    )
]
