"""XTC ("exclude top choices"): now and then exclude all of the most probable tokens but the least
probable of them.

As in llama.cpp and text-generation-webui: the candidates are the tokens that pass the filters and
are at least as probable as the threshold. With a given probability, all candidates but the least
probable are excluded. (XTC comes after temperature and filters, where text-generation-webui has
it.) A separate stream decides whether this happens, so that a token's noise is the same with and
without it.

Shape legend: R rows, V vocabulary, K largest logits of a row.
"""

from dataclasses import dataclass

import torch

from quire.ops.sampling.choice import FIRST_K, Filters, Streams, choose, gumbel, keep_candidates
from quire.ops.sampling.logprobs import log_sum_exp
from quire.ops.sampling.philox import DOMAIN_XTC, uniform_at, uniform_at_reference
from quire.ops.sampling.top_k import top_k


@dataclass(frozen=True)
class Xtc:
    """Parameters of XTC. probability, threshold: float64 [R]. min_threshold: the smallest of the
    thresholds, above 0."""

    probability: torch.Tensor
    threshold: torch.Tensor
    min_threshold: float

    def of(self, index: torch.Tensor) -> "Xtc":
        return Xtc(self.probability[index], self.threshold[index], self.min_threshold)


def is_drawn(xtc: Xtc, streams: Streams) -> torch.Tensor:
    """Return in which rows the most probable tokens are excluded, bool [R]."""
    zeros_R1 = torch.zeros_like(streams.positions)[:, None]
    rows = (streams.seeds, streams.sample_index, streams.positions)
    return uniform_at_reference(*rows, zeros_R1, DOMAIN_XTC)[:, 0].double() < xtc.probability


def excluded(probabilities_RK: torch.Tensor, xtc: Xtc, streams: Streams) -> torch.Tensor:
    """Return which of the most probable tokens, in descending order, cannot be chosen: bool [R, K].
    Tokens that filters have removed must have probability 0."""
    is_top_RK = probabilities_RK >= xtc.threshold[:, None]
    is_followed_RK = torch.nn.functional.pad(is_top_RK[:, 1:], (0, 1))
    return is_followed_RK & is_drawn(xtc, streams)[:, None]


def choose_with_xtc(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    streams: Streams,
    xtc: Xtc,
    filters: Filters | None = None,
) -> torch.Tensor:
    """Return a sample per row, as `quire.ops.sampling.choice.choose`, without excluded tokens:
    int64 [R]."""
    if filters is None:
        return choose(
            _without_top(logits_RV, temperatures_R, streams, xtc), temperatures_R, streams
        )
    vocab_size = logits_RV.shape[-1]
    k = min(FIRST_K, vocab_size) if logits_RV.device.type == "cpu" else vocab_size
    ids_R, is_done_R = _choose_among(logits_RV, temperatures_R, streams, xtc, filters, k)
    if k < vocab_size and not is_done_R.all():
        left = (~is_done_R).nonzero()[:, 0]
        some = logits_RV[left], temperatures_R[left], streams.of(left), xtc.of(left)
        ids_R[left] = _choose_among(*some, filters.of(left), vocab_size)[0]
    return ids_R


def _without_top(
    logits_RV: torch.Tensor, temperatures_R: torch.Tensor, streams: Streams, xtc: Xtc
) -> torch.Tensor:
    """Return a copy without excluded tokens, of which there are no more than 1 / threshold."""
    k = min(int(1 / xtc.min_threshold) + 1, logits_RV.shape[-1])
    values_RK, ids_RK = top_k(logits_RV, k)
    scaled_RK = values_RK.double() / temperatures_R[:, None].double()
    probabilities_RK = (scaled_RK - log_sum_exp(logits_RV, temperatures_R)[:, None]).exp()
    excluded_RK = excluded(probabilities_RK, xtc, streams)
    return logits_RV.scatter(-1, ids_RK, values_RK.masked_fill(excluded_RK, -torch.inf))


def _choose_among(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    streams: Streams,
    xtc: Xtc,
    filters: Filters,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids chosen among the k largest logits, int64 [R], and where these sufficed, bool
    [R]."""
    values_RK, ids_RK = top_k(logits_RV, k)
    scaled_RK = values_RK.double() / temperatures_R[:, None].double()
    total_R = log_sum_exp(logits_RV, temperatures_R)
    passes_RK, is_done_R = keep_candidates(scaled_RK, total_R, filters, logits_RV.shape[-1])
    weights_RK = (scaled_RK - scaled_RK[:, :1]).exp() * passes_RK
    probabilities_RK = weights_RK / weights_RK.sum(dim=-1, keepdim=True)
    passes_RK &= ~excluded(probabilities_RK, xtc, streams)
    noise_RK = uniform_at(streams.seeds, streams.sample_index, streams.positions, ids_RK)
    scores_RK = (scaled_RK + gumbel(noise_RK)).masked_fill(~passes_RK, -torch.inf)
    return ids_RK.gather(-1, scores_RK.argmax(dim=-1, keepdim=True))[:, 0], is_done_R
