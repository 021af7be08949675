"""Compute log-probabilities of chosen and most probable tokens, from raw logits in float32.

`log_sum_exp` normalises logits to log-probabilities: log(sum(exp(logits / temperature))) of each
row.

Shape legend: R rows, V vocabulary, C candidates.
"""

from dataclasses import dataclass

import torch

from quire.ops.gpu import kernels_for
from quire.ops.host import native
from quire.ops.host.threads import num_threads
from quire.ops.sampling.top_k import top_k


def log_sum_exp_reference(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `log_sum_exp` with torch, float64 [R].

    It uses log_softmax, which works row by row. A plain sum over a single long row may be split
    between threads. But a row's result must not depend on the number of other rows.
    """
    scaled_RV = logits_RV if temperatures_R is None else logits_RV / temperatures_R[:, None]
    peak_R, ids_R = scaled_RV.max(dim=-1)
    at_peak_R = scaled_RV.log_softmax(dim=-1).gather(-1, ids_R[:, None])[:, 0]
    return peak_R.double() - at_peak_R.double()


def log_sum_exp(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Return log(sum(exp(logits / temperature))) of each row, float64 [R]. temperatures_R: float32,
    above 0; ones if absent."""
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


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of each row: the chosen token first, then C candidates. These are the most
    probable tokens or given ones, and may include the chosen token.

    token_ids: int64 [R, 1 + C]. logprobs: float32 [R, 1 + C]. ranks: int64 [R], of the chosen
    token; 1 is the first.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


def token_rank_reference(logits_RV: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
    """Compute `token_rank` with torch, int64 [R]."""
    chosen_R1 = logits_RV.gather(-1, ids_R[:, None])
    ids_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    is_tie_before_RV = (logits_RV == chosen_R1) & (ids_V < ids_R[:, None])
    return 1 + ((logits_RV > chosen_R1) | is_tie_before_RV).sum(dim=-1)


def token_rank(logits_RV: torch.Tensor, ids_R: torch.Tensor) -> torch.Tensor:
    """Return the rank of a token among its row's logits, int64 [R], from 1; ties are in the order
    of ids."""
    core = native.core_for(logits_RV, ids_R)
    if core is None:
        return token_rank_reference(logits_RV, ids_R)
    ids_R = ids_R.contiguous()
    ranks_R = torch.empty_like(ids_R)
    core.token_rank(
        native.address(ranks_R, torch.int64),
        native.address(logits_RV, torch.float32),
        native.address(ids_R, torch.int64),
        logits_RV.shape[0],
        logits_RV.shape[1],
        num_threads(),
    )
    return ranks_R


def token_logprobs(
    logits_RV: torch.Tensor,
    chosen_R: torch.Tensor,
    num_candidates: int,
    raw_RV: torch.Tensor | None = None,
) -> TokenLogprobs:
    """Return log-softmax, in float32, of logits [R, V] of any float dtype at the chosen tokens and
    the num_candidates best ones. raw_RV: the same logits before some were masked. Masked tokens
    then count in the softmax, and get -infinity themselves."""
    if raw_RV is not None:
        masked_RV, raw_RV = logits_RV.float().contiguous(), raw_RV.float().contiguous()
        return token_logprobs_reference(masked_RV, chosen_R, num_candidates, raw_RV)
    if kernels := kernels_for(logits_RV, "sampling.logprobs"):
        found: TokenLogprobs = kernels.token_logprobs(logits_RV, chosen_R, num_candidates)
        return found
    return token_logprobs_reference(logits_RV.float().contiguous(), chosen_R, num_candidates)


def named_logprobs(
    logits_RV: torch.Tensor, chosen_R: torch.Tensor, ids_RC: torch.Tensor
) -> TokenLogprobs:
    """Return log-softmax, in float32, of logits [R, V] of any float dtype. It covers the chosen
    tokens and then the given ids, int64 [R, C], in their order."""
    logits_RV = logits_RV.float().contiguous()
    totals_R = log_sum_exp(logits_RV)
    all_RC = torch.cat((chosen_R[:, None], ids_RC), dim=-1)
    logprobs_RC = (logits_RV.gather(-1, all_RC).double() - totals_R[:, None]).float()
    return TokenLogprobs(all_RC, logprobs_RC, token_rank(logits_RV, chosen_R))


def token_logprobs_reference(
    logits_RV: torch.Tensor,
    chosen_R: torch.Tensor,
    num_candidates: int,
    raw_RV: torch.Tensor | None = None,
) -> TokenLogprobs:
    """Compute `token_logprobs` of float32 logits [R, V], with torch on any device and with the C++
    core."""
    totals_R = log_sum_exp(logits_RV if raw_RV is None else raw_RV)
    num_candidates = min(num_candidates, logits_RV.shape[-1])
    values_R1 = logits_RV.gather(-1, chosen_R[:, None])
    ids_RC, values_RC = chosen_R[:, None], values_R1
    if num_candidates > 0:
        best_values_RC, best_ids_RC = top_k(logits_RV, num_candidates)
        ids_RC = torch.cat((ids_RC, best_ids_RC), dim=-1)
        values_RC = torch.cat((values_R1, best_values_RC), dim=-1)
    logprobs_RC = (values_RC.double() - totals_R[:, None]).float()
    return TokenLogprobs(ids_RC, logprobs_RC, token_rank(logits_RV, chosen_R))
