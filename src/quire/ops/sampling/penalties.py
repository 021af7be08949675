"""Apply penalties for tokens that occurred before. They change logits in place.

Only the tokens that a sequence holds are touched. So the cost follows its length and not the
vocabulary (except for one buffer of counts).

Shape legend: R rows, P penalised rows, V vocabulary, M known tokens of a row (padded).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Penalties:
    """Penalties of the rows, float32 [P] each; 0, 0 and 1 change nothing."""

    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


def apply_penalties(
    logits_RV: torch.Tensor,
    which_P: torch.Tensor,
    tokens_PM: torch.Tensor,
    lengths_P: torch.Tensor,
    prompt_lens_P: torch.Tensor,
    penalties: Penalties,
) -> None:
    """Apply penalties to rows of logits [R, V]. Repetition counts prompt and output, presence and
    frequency count the output alone.

    A logit above 0 is divided by the repetition penalty, any other is multiplied by it. Then the
    frequency penalty is subtracted per occurrence, and the presence penalty once. logits_RV:
    float32, contiguous. which_P: distinct rows of it, int64. tokens_PM: integers; entries at and
    after a row's length (at least 1) are ignored.
    """
    vocab_size = logits_RV.shape[-1]
    places_M = torch.arange(tokens_PM.shape[-1], device=tokens_PM.device)
    is_known_PM = places_M < lengths_P[:, None]
    is_output_PM = is_known_PM & (places_M >= prompt_lens_P[:, None])
    # Padding repeats the first token: a token that occurs several times is written several times,
    # each time with the same value.
    ids_PM = torch.where(is_known_PM, tokens_PM, tokens_PM[:, :1]).long()
    counts_PV = torch.zeros(len(which_P), vocab_size, device=logits_RV.device)
    counts_PV.scatter_add_(-1, ids_PM, is_output_PM.float())
    counts_PM = counts_PV.gather(-1, ids_PM)

    flat_PM = which_P[:, None] * vocab_size + ids_PM
    values_PM = logits_RV.view(-1)[flat_PM]
    repetition_P1 = penalties.repetition[:, None]
    values_PM = torch.where(values_PM > 0, values_PM / repetition_P1, values_PM * repetition_P1)
    values_PM -= penalties.frequency[:, None] * counts_PM
    values_PM -= penalties.presence[:, None] * (counts_PM > 0)
    logits_RV.view(-1)[flat_PM] = values_PM
