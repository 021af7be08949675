"""Choose a token: temperature, min-p, top-k, top-p, and the Gumbel-max choice with Philox noise.

With Gumbel noise g = -log(-log(1 - u)), argmax(logit / temperature + g) is a sample of the softmax.
The noise of a token depends on its id, the seed, the sample index and the position
(ops/sampling/philox.py). So a filter changes nothing else about the choice, and no row depends on
the others of its batch. Scores are float64: ties do not occur in practice, and the first candidate
wins if they do.

Filters work on the K largest logits in descending order, so no full sort is needed unless the
nucleus is wider than K. The order is min-p, then top-k, then top-p of the remaining tokens, as in
vLLM.

Shape legend: R rows, V vocabulary, K largest logits of a row.
"""

from dataclasses import dataclass

import torch

from quire.ops.host import native
from quire.ops.host.threads import num_threads
from quire.ops.sampling.logprobs import log_sum_exp
from quire.ops.sampling.philox import uniform, uniform_at
from quire.ops.sampling.top_k import top_k

FIRST_K = 1024


@dataclass(frozen=True)
class Streams:
    """Noise streams that the rows draw from: int64 [R] each."""

    seeds: torch.Tensor
    sample_index: torch.Tensor
    positions: torch.Tensor

    def of(self, index: torch.Tensor) -> "Streams":
        return Streams(self.seeds[index], self.sample_index[index], self.positions[index])


@dataclass(frozen=True)
class Filters:
    """Filters of the rows, [R] each. top_k: int64, 0 or less is off. top_p, min_p: float32."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def of(self, index: torch.Tensor) -> "Filters":
        return Filters(self.top_k[index], self.top_p[index], self.min_p[index])


def gumbel(uniform_: torch.Tensor) -> torch.Tensor:
    """Convert uniform noise [...] in (0, 1) to Gumbel noise, float64. Small u give large noise."""
    return -torch.log(-torch.log1p(-uniform_.double()))


def keep_candidates(
    scaled_RK: torch.Tensor, log_total_R: torch.Tensor | None, filters: Filters, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the K largest logits pass, bool [R, K], and in which rows no other token can
    pass, bool [R].

    scaled_RK: float64, divided by the temperature, in descending order. log_total_R: float64, log
    of the sum of exp over the whole row; None if every row's top_k is within K.
    """
    k = scaled_RK.shape[-1]
    top_k_R = torch.where(filters.top_k > 0, filters.top_k, vocab_size)
    floor_R = scaled_RK[:, 0] + filters.min_p.double().log()
    weights_RK = (scaled_RK - scaled_RK[:, :1]).exp()

    places_K = torch.arange(k, device=scaled_RK.device)
    passes_RK = (scaled_RK >= floor_R[:, None]) & (places_K < top_k_R[:, None])
    has_all_R = (top_k_R <= k) | (scaled_RK[:, -1] < floor_R) | (k == vocab_size)
    mass_RK = (weights_RK * passes_RK).cumsum(dim=-1)

    # The total of the tokens that passed min-p and top-k; of the whole row if neither is in use.
    is_open_R = (top_k_R >= vocab_size) & (filters.min_p <= 0)
    total_R = mass_RK[:, -1]
    if log_total_R is not None:
        row_total_R = (log_total_R - scaled_RK[:, 0]).exp()
        total_R = torch.where(is_open_R & ~has_all_R, row_total_R, total_R)

    # A token is in the nucleus if the tokens before it have not reached top_p. The first always is.
    top_p_R = filters.top_p.double()
    goal_R = torch.where(top_p_R < 1, top_p_R * total_R, torch.inf)
    passes_RK &= (mass_RK - weights_RK * passes_RK) < goal_R[:, None]
    has_nucleus_R = is_open_R & (mass_RK[:, -1] >= goal_R)
    return passes_RK, has_all_R | has_nucleus_R


def choose_among(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    filters: Filters,
    streams: Streams,
    k: int,
    *,
    has_every_top_k: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids chosen among the k largest logits, int64 [R], and in which rows these sufficed,
    bool [R].

    has_every_top_k: whether all rows have a top_k of at most k, so that no other logit matters.
    """
    vocab_size = logits_RV.shape[-1]
    values_RK, ids_RK = top_k(logits_RV, k)
    scaled_RK = values_RK.double() / temperatures_R[:, None].double()
    log_total_R = None if has_every_top_k else log_sum_exp(logits_RV, temperatures_R)
    passes_RK, is_done_R = keep_candidates(scaled_RK, log_total_R, filters, vocab_size)
    noise_RK = uniform_at(streams.seeds, streams.sample_index, streams.positions, ids_RK)
    scores_RK = (scaled_RK + gumbel(noise_RK)).masked_fill(~passes_RK, -torch.inf)
    best_R1 = scores_RK.argmax(dim=-1, keepdim=True)
    return ids_RK.gather(-1, best_R1)[:, 0], is_done_R


def choose_reference(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    streams: Streams,
    filters: Filters | None = None,
    largest_k: int | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Compute `choose` with torch, int64 [R].

    If filters may leave more than FIRST_K tokens, it checks on a CPU whether they did. On other
    devices all tokens are candidates at once, since the check would make the host wait.
    """
    vocab_size = logits_RV.shape[-1]
    if filters is None:
        stream_R = (streams.seeds, streams.sample_index, streams.positions)
        scores_RV = logits_RV.double() / temperatures_R[:, None].double()
        noise_RV = uniform(*stream_R, first + vocab_size)[:, first:]
        return scores_RV.add_(gumbel(noise_RV)).argmax(dim=-1)
    if largest_k is not None:
        k = min(largest_k, vocab_size)
        row = (logits_RV, temperatures_R, filters, streams)
        return choose_among(*row, k, has_every_top_k=True)[0]
    k = min(FIRST_K, vocab_size) if logits_RV.device.type == "cpu" else vocab_size
    ids_R, is_done_R = choose_among(logits_RV, temperatures_R, filters, streams, k)
    if k < vocab_size and not is_done_R.all():
        left = (~is_done_R).nonzero()[:, 0]
        some = (logits_RV[left], temperatures_R[left], filters.of(left), streams.of(left))
        ids_R[left] = choose_among(*some, vocab_size)[0]
    return ids_R


def choose(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    streams: Streams,
    filters: Filters | None = None,
    largest_k: int | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Return a sample per row of the tokens of softmax(logits / temperature) that pass the filters,
    int64 [R].

    logits_RV: float32, contiguous. temperatures_R: float32, above 0. largest_k: the largest top_k,
    if every row has one. An id is a column's index, and its noise is the noise of token `first` +
    id. A row without a finite logit gets any id.
    """
    core = native.core_for(logits_RV)
    if core is None:
        return choose_reference(logits_RV, temperatures_R, streams, filters, largest_k, first)
    ids_R = torch.empty(len(logits_RV), dtype=torch.int64)
    core.choose(
        native.address(ids_R, torch.int64),
        native.address(logits_RV, torch.float32),
        native.address(temperatures_R, torch.float32),
        native.address(filters.top_k, torch.int64) if filters else 0,
        native.address(filters.top_p, torch.float32) if filters else 0,
        native.address(filters.min_p, torch.float32) if filters else 0,
        logits_RV.shape[0],
        logits_RV.shape[1],
        first,
        native.address(streams.seeds, torch.int64),
        native.address(streams.sample_index, torch.int64),
        native.address(streams.positions, torch.int64),
        num_threads(),
    )
    return ids_R


def scores_of_part(
    logits_RV: torch.Tensor,
    ids_R: torch.Tensor,
    peaks_R: torch.Tensor,
    temperatures_R: torch.Tensor,
    streams: Streams,
    first: int,
) -> torch.Tensor:
    """Return the scores of tokens chosen from a part of the vocabulary, float64 [R], to compare
    with other parts' choices. A score is -inf if all logits of the part are -inf, and inf if they
    include NaN or infinity.

    ids_R: columns. peaks_R: the largest logit of each row. temperatures_R: 0 for a greedy row.
    first: token id of column 0.
    """
    logits_R = logits_RV.gather(1, ids_R[:, None])[:, 0].double()
    stream_R = (streams.seeds, streams.sample_index, streams.positions)
    noise_R = gumbel(uniform_at(*stream_R, (ids_R + first)[:, None])[:, 0])
    is_greedy_R = temperatures_R <= 0
    divisors_R = torch.where(is_greedy_R, 1.0, temperatures_R.double())
    scores_R = torch.where(is_greedy_R, logits_R, logits_R / divisors_R + noise_R)
    nothing_R = torch.where(peaks_R == -torch.inf, -torch.inf, torch.inf).double()
    return torch.where(peaks_R.isfinite(), scores_R, nothing_R)
