"""Penalties for tokens that were there before. They change logits in place.

Shape legend: R rows, V vocabulary, M known tokens of a row (padded).
"""

import torch


def apply_penalties(
    logits_RV: torch.Tensor,
    tokens_RM: torch.Tensor,
    lengths_R: torch.Tensor,
    prompt_lens_R: torch.Tensor,
    presence_R: torch.Tensor,
    frequency_R: torch.Tensor,
    repetition_R: torch.Tensor,
) -> None:
    """Repetition counts prompt and output, presence and frequency count the output alone.

    tokens_RM: integers; what stands at and after a row's length is not looked at. A logit above 0
    is divided by the repetition penalty, one below is multiplied with it; then the frequency
    penalty is taken off per occurrence, and the presence penalty once.
    """
    places_M = torch.arange(tokens_RM.shape[-1], device=tokens_RM.device)
    is_known_RM = places_M < lengths_R[:, None]
    is_output_RM = is_known_RM & (places_M >= prompt_lens_R[:, None])
    ids_RM = torch.where(is_known_RM, tokens_RM.long(), 0)
    seen_RV = torch.zeros_like(logits_RV).scatter_add_(-1, ids_RM, is_known_RM.to(logits_RV.dtype))
    counts_RV = torch.zeros_like(logits_RV).scatter_add_(
        -1, ids_RM, is_output_RM.to(logits_RV.dtype)
    )
    factor_RV = torch.where(seen_RV > 0, repetition_R[:, None], 1.0)
    logits_RV.copy_(torch.where(logits_RV > 0, logits_RV / factor_RV, logits_RV * factor_RV))
    logits_RV -= frequency_R[:, None] * counts_RV
    logits_RV -= presence_R[:, None] * (counts_RV > 0)
