"""Changes to a row's logits that the request asks for: masks and biases. In place, one row each.

In vLLM's order: allowed tokens, bad words, min_tokens, then biases (penalties come after).
Shape legend: V vocabulary, M places of a row's token buffer, W bad words, L longest of them.
"""

import torch

from quire.runner.sampling_rows import BadWords, LogitEdits


def apply_edits(
    logits_V: torch.Tensor,
    edits: LogitEdits,
    tokens_M: torch.Tensor,
    num_tokens: int,
    num_prompt_tokens: int,
) -> None:
    """num_tokens: known tokens of the sequence, the prompt included."""
    if edits.allowed is not None:
        allowed_V = torch.full_like(logits_V, -torch.inf)
        allowed_V[edits.allowed] = logits_V[edits.allowed]
        logits_V.copy_(allowed_V)
    if edits.bad_words is not None:
        output = tokens_M[num_prompt_tokens:num_tokens]
        _mask_bad_words(logits_V, edits.bad_words, output)
    if edits.stop_token_ids is not None and num_tokens - num_prompt_tokens < edits.min_tokens:
        logits_V[edits.stop_token_ids] = -torch.inf
    if edits.bias_ids is not None and edits.bias is not None:
        logits_V[edits.bias_ids] += edits.bias


def _mask_bad_words(logits_V: torch.Tensor, words: BadWords, output: torch.Tensor) -> None:
    """Mask the last token of each word whose other tokens are the output's last ones."""
    num_places = words.prefix.shape[1]
    num_here = min(num_places, len(output))
    tail = torch.full_like(words.prefix[0], -1)
    tail[num_places - num_here :] = output[len(output) - num_here :]
    # Places before a word's beginning count as equal.
    is_padding_WL = (
        torch.arange(num_places, device=logits_V.device) < (num_places - words.prefix_lens)[:, None]
    )
    matches_W = ((words.prefix == tail) | is_padding_WL).all(dim=-1)
    # Several words may end in one token, so that writing the masked value itself would be a race.
    limits_W = torch.where(matches_W, -torch.inf, torch.inf)
    logits_V.scatter_reduce_(0, words.last, limits_W.to(logits_V.dtype), "amin")
