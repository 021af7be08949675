"""log(sum(exp(logits / temperature))) of each row: what turns logits into log-probabilities.

Shape legend: R rows, V vocabulary.
"""

import torch

from quire.ops import native
from quire.ops.threads import num_threads


def log_sum_exp_reference(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor | None = None
) -> torch.Tensor:
    """The torch path of `log_sum_exp`.

    By way of log_softmax, which works row by row: a plain sum over a single long row may be split
    between threads, and a row's result must not depend on how many others there are.
    """
    scaled_RV = logits_RV if temperatures_R is None else logits_RV / temperatures_R[:, None]
    peak_R, ids_R = scaled_RV.max(dim=-1)
    at_peak_R = scaled_RV.log_softmax(dim=-1).gather(-1, ids_R[:, None])[:, 0]
    return peak_R.double() - at_peak_R.double()


def log_sum_exp(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor | None = None
) -> torch.Tensor:
    """float64 [R]. temperatures_R is float32 [R], above 0; ones if absent."""
    core = native.core_for(logits_RV)
    if core is None:
        return log_sum_exp_reference(logits_RV, temperatures_R)
    num_rows, vocab_size = logits_RV.shape
    if temperatures_R is None:
        temperatures_R = torch.ones(num_rows)
    out_R = torch.empty(num_rows, dtype=torch.float64)
    core.log_sum_exp(
        native.address(out_R, torch.float64),
        native.address(logits_RV, torch.float32),
        native.address(temperatures_R, torch.float32),
        num_rows,
        vocab_size,
        num_threads(),
    )
    return out_R
