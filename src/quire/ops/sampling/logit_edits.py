"""Edit logits as requests specify: masks, allowed tokens, bad words, min_tokens, biases.

The lists of all rows are in one table, made when such a request starts and not in each step.
`apply_edits` is the torch path, one row at a time. On a GPU `kernels/sampling/sampling_edits.py`
edits all rows of a step. The order is vLLM's: allowed tokens, bad words, min_tokens, then biases
(penalties come after).

Bit t % 32 of word t // 32 of a mask stands for token t. Bits beyond the vocabulary are ignored;
tokens beyond the words are forbidden. A forbidden token gets a logit of -infinity, and an allowed
one keeps its logit, to the last bit.

Shape legend: S rows of the table, V vocabulary, M tokens of a row's buffer, or masks, B bad words,
N rows of logits, W words of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quire.ops.gpu import kernels_for
from quire.ops.host import native
from quire.ops.host.threads import num_threads

# Columns of a row's span: where each list begins among the entries, followed by its length.
ALLOWED, WORDS, STOPS, BIASES, MIN_TOKENS, LONGEST, SPAN = 0, 2, 4, 6, 8, 9, 10
LIST_COLUMNS = ALLOWED, WORDS, STOPS, BIASES  # columns with indices of entries


@dataclass(frozen=True)
class RowEdits:
    """Edits that one row's request specifies; bad words are lists of at least one token."""

    allowed: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    bias: dict[int, float] | None = None


@dataclass(frozen=True)
class EditTable:
    """Edits of S rows. entries: int32, token ids (of bad words also lengths). values: float32, the
    biases, at the indices of their entries. spans: int32 [S, 10]."""

    entries: torch.Tensor
    values: torch.Tensor
    spans: torch.Tensor


def make_edit_table(rows: Sequence[RowEdits], device: torch.device) -> EditTable:
    """Write the rows' lists one after another and copy them to the device.

    A row's bad words are stored as all last tokens, the number of tokens before each last one, and
    these tokens themselves. The latter are padded on the left to the longest word.
    """
    entries: list[int] = []
    values: list[float] = []
    spans: list[list[int]] = []
    for row in rows:
        bias = row.bias or {}
        longest = max((len(word) for word in row.bad_words), default=1)
        words = [word[-1] for word in row.bad_words]
        words += [len(word) - 1 for word in row.bad_words]
        for word in row.bad_words:
            words += [0] * (longest - len(word)) + list(word[:-1])
        stops = row.stop_token_ids if row.min_tokens > 0 else ()
        span: list[int] = []
        lists = (row.allowed, words, stops, bias)
        counts = (len(row.allowed), len(row.bad_words), len(stops), len(bias))
        for tokens, count in zip(lists, counts, strict=True):
            span += [len(entries), count]
            entries += tokens
        values += [0.0] * (len(entries) - len(values) - len(bias)) + list(bias.values())
        spans.append([*span, row.min_tokens, longest])
    return EditTable(
        torch.tensor(entries or [0], dtype=torch.int32, device=device),
        torch.tensor(values or [0.0], dtype=torch.float32, device=device),
        torch.tensor(spans, dtype=torch.int32, device=device).reshape(-1, SPAN),
    )


def apply_edits(
    logits_V: torch.Tensor,
    table: EditTable,
    span: npt.NDArray[np.int32],
    tokens_M: torch.Tensor,
    num_tokens: torch.Tensor,
    num_prompt_tokens: int,
) -> None:
    """Edit a row's logits [V] in place. span: the row's, on the host. tokens_M: the row's tokens.
    num_tokens: the sequence's tokens, prompt included, a scalar on the device."""

    def ids(column: int) -> torch.Tensor:
        return table.entries[span[column] : span[column] + span[column + 1]].long()

    if span[ALLOWED + 1]:
        allowed, allowed_V = ids(ALLOWED), torch.full_like(logits_V, -torch.inf)
        allowed_V[allowed] = logits_V[allowed]
        logits_V.copy_(allowed_V)
    if span[WORDS + 1]:
        places = num_tokens + torch.arange(1 - int(span[LONGEST]), 0, device=logits_V.device)
        is_output = places >= num_prompt_tokens
        tail_P = torch.where(is_output, tokens_M[places.clamp(min=0)], -1)
        _mask_bad_words(logits_V, table, span, tail_P)
    if span[STOPS + 1]:
        stops = ids(STOPS)
        is_short = num_tokens - num_prompt_tokens < int(span[MIN_TOKENS])
        logits_V[stops] = torch.where(is_short, -torch.inf, logits_V[stops])
    if span[BIASES + 1]:
        first = span[BIASES]
        logits_V[ids(BIASES)] += table.values[first : first + span[BIASES + 1]]


def _mask_bad_words(
    logits_V: torch.Tensor, table: EditTable, span: npt.NDArray[np.int32], tail_P: torch.Tensor
) -> None:
    """Mask the last token of each word whose other tokens are the output's last ones. tail_P: as
    many last tokens as the longest word needs, -1 where there are fewer."""
    first, num_words, prefix_width = span[WORDS], int(span[WORDS + 1]), int(span[LONGEST]) - 1
    words = table.entries[first : first + num_words * (2 + prefix_width)]
    last_W, prefix_lens_W = words[:num_words].long(), words[num_words : 2 * num_words]
    prefix_WP = words[2 * num_words :].view(num_words, prefix_width)
    # Padding before a word's beginning counts as equal.
    is_padding_WP = (
        torch.arange(prefix_width, device=logits_V.device) < (prefix_width - prefix_lens_W)[:, None]
    )
    matches_W = ((prefix_WP == tail_P) | is_padding_WP).all(dim=-1)
    # Several words may end in one token, so writing the masked value itself would be a race.
    limits_W = torch.where(matches_W, -torch.inf, torch.inf)
    logits_V.scatter_reduce_(0, last_W, limits_W.to(logits_V.dtype), "amin")


BITS = 32


@dataclass(frozen=True)
class RowMasks:
    """Token masks, contiguous and on the logits' device. places: int32 [M], distinct rows of the
    logits; kernels skip -1. words: int32 [M, W]."""

    places: torch.Tensor
    words: torch.Tensor


def num_words(vocab_size: int) -> int:
    """Return the number of words of a vocabulary's mask."""
    return -(-vocab_size // BITS)


def allowed_reference(words_MW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return which tokens the words allow, bool [M, V]."""
    bits_B = torch.arange(BITS, device=words_MW.device)
    bits_MV = (words_MW[:, :, None] >> bits_B & 1).bool().flatten(1)
    return torch.nn.functional.pad(bits_MV, (0, vocab_size - bits_MV.shape[1]))


def apply_masks_reference(logits_NV: torch.Tensor, masks: RowMasks) -> None:
    """Apply masks to logits [N, V] with torch, on any device."""
    places_M = masks.places.long()
    allowed_MV = allowed_reference(masks.words, logits_NV.shape[-1])
    masked_MV = logits_NV.index_select(0, places_M).masked_fill_(~allowed_MV, -torch.inf)
    logits_NV.index_copy_(0, places_M, masked_MV)


def apply_masks(logits_NV: torch.Tensor, masks: RowMasks) -> None:
    """Set logits [N, V] to -infinity in place where the masks forbid a token. logits_NV:
    contiguous; float32 on a CPU."""
    if kernels := kernels_for(logits_NV, "sampling.mask"):
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
