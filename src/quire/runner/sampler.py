"""From logits to tokens: what each row asked for, with as little work as the rows of a step need.

Order, as in vLLM: log-probabilities from the raw logits; masks, biases, penalties; the greedy
choice, or temperature, min-p, top-k, top-p and a random choice. A row's token never depends on
which other rows are in the step. A step of greedy rows is one arg max; masks and penalties cost
only the rows that ask for them.

Shape legend: N sampling rows of the step, T prompt tokens, V vocabulary, M a row's token places.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from quire.base.plan import Candidates, RowStart
from quire.ops.logprobs import TokenLogprobs, token_logprobs
from quire.ops.penalties import apply_penalties
from quire.ops.sampling import choose
from quire.ops.top_k import arg_max
from quire.runner.logit_edits import apply_edits
from quire.runner.sampling_facts import ALL_LOGPROBS
from quire.runner.sampling_rows import SamplingRows

Rows = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Indices = npt.NDArray[np.intp]

_NOT_FINITE = "The model's logits for this sequence are not finite (NaN or infinity)."
_NOTHING_LEFT = (
    "No token can be chosen: the model's logits are not finite, or allowed_token_ids, bad_words,"
    " min_tokens and logit_bias together leave no token."
)


@dataclass
class SampledTokens:
    """What `Sampler.sample` chose. token_ids_N: int64 on the device, 0 for rows with an error.

    `candidates` and `row_errors` are keyed by row and copy from the device when they are read.
    """

    rows: Rows
    token_ids_N: torch.Tensor
    is_valid_N: torch.Tensor
    edited_rows: frozenset[int] = frozenset()
    logprobs: list[tuple[Rows, Int64, TokenLogprobs]] = field(default_factory=list)

    @property
    def row_errors(self) -> dict[int, str]:
        """What went wrong, for the rows that have no token to choose."""
        failed = self.rows[~self.is_valid_N.cpu().numpy()]
        return describe_failures(failed.tolist(), self.edited_rows)

    @property
    def unservable_rows(self) -> tuple[int, ...]:
        """Those of them that asked for masks or biases."""
        return tuple(row for row in self.row_errors if row in self.edited_rows)

    @property
    def candidates(self) -> dict[int, Candidates]:
        """Log-probabilities of the rows that asked for them and have no error."""
        found: dict[int, Candidates] = {}
        for rows, counts, result in self.logprobs:
            found.update(zip(rows.tolist(), to_candidates(result, counts), strict=True))
        failed = self.row_errors if found else {}
        return {row: item for row, item in found.items() if row not in failed}


class Sampler:
    """Holds how each row samples, and chooses the tokens of a step."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows = SamplingRows(max_num_rows, self.device)

    def start_row(self, start: RowStart) -> None:
        """A sequence takes a row."""
        self._rows.start(start)

    def release_rows(self, rows: Rows) -> None:
        """Sequences have left their rows."""
        self._rows.release(np.asarray(rows))

    def copy_row(self, parent: int, child: int, sample_index: int | None = None) -> None:
        """A fork. With the parent's sample index the child would draw the same noise."""
        self._rows.copy(parent, child, sample_index)

    def sample(
        self,
        logits_NV: torch.Tensor,
        rows: Rows,
        positions: Int64,
        tokens_RM: torch.Tensor,
        lengths: Int64,
        prompt_lens: Int64,
    ) -> SampledTokens:
        """One token per row of `rows`, which are distinct. The logits are not changed.

        logits_NV: any float dtype, the raw output of the model. positions [N]: index that each new
        token will have in its sequence. tokens_RM: token buffers of all rows, of any integer dtype;
        lengths [N]: how many of a row's tokens are known, prompt_lens [N]: how many are prompt.
        """
        raw_NV = logits_NV.float().contiguous()
        edited_NV = self._edit(raw_NV, rows, tokens_RM, lengths, prompt_lens)
        best_N, values_N = arg_max(edited_NV)
        is_valid_N = values_N.isfinite()
        ids_N = self._choose(edited_NV, best_N, rows, positions)
        ids_N = torch.where(is_valid_N, ids_N, 0)
        edited = rows[self._rows.facts.has_edits[rows]]
        return SampledTokens(
            rows,
            ids_N,
            is_valid_N,
            frozenset(edited.tolist()),
            self._logprobs(raw_NV, ids_N, rows),
        )

    def prompt_logprobs(
        self, logits_TV: torch.Tensor, target_ids_T: torch.Tensor, num: int
    ) -> list[Candidates]:
        """Candidates per position, of which target_ids_T are the tokens that do follow there."""
        logits_TV = logits_TV.float().contiguous()
        result = token_logprobs(logits_TV, target_ids_T.to(self.device).long(), num)
        return to_candidates(result, np.full(len(logits_TV), num))

    def _index(self, indices: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(indices.astype(np.int64)).to(self.device)

    def _edit(
        self,
        raw_NV: torch.Tensor,
        rows: Rows,
        tokens_RM: torch.Tensor,
        lengths: Int64,
        prompt_lens: Int64,
    ) -> torch.Tensor:
        """Masks, biases and penalties, on a copy; the raw logits if no row has any."""
        edited = np.flatnonzero(self._rows.facts.has_edits[rows])
        penalised = np.flatnonzero(self._rows.facts.has_penalties[rows])
        if len(edited) == 0 and len(penalised) == 0:
            return raw_NV
        logits_NV = raw_NV.clone()
        for n in edited.tolist():
            row = int(rows[n])
            edits, tokens_M = self._rows.edits[row], tokens_RM[row]
            apply_edits(logits_NV[n], edits, tokens_M, int(lengths[n]), int(prompt_lens[n]))
        if len(penalised) > 0:
            self._penalise(logits_NV, penalised, rows, tokens_RM, lengths, prompt_lens)
        return logits_NV

    def _penalise(
        self,
        logits_NV: torch.Tensor,
        which: Indices,
        rows: Rows,
        tokens_RM: torch.Tensor,
        lengths: Int64,
        prompt_lens: Int64,
    ) -> None:
        at_rows = self._index(rows[which])
        longest = int(lengths[which].max())
        apply_penalties(
            logits_NV,
            self._index(which),
            tokens_RM[at_rows, :longest],
            self._index(lengths[which]),
            self._index(prompt_lens[which]),
            self._rows.penalties(at_rows),
        )

    def _choose(
        self, logits_NV: torch.Tensor, best_N: torch.Tensor, rows: Rows, positions: Int64
    ) -> torch.Tensor:
        """The greedy choice, with that of the rows that sample written over it."""
        is_random = ~self._rows.facts.is_greedy[rows]
        if not is_random.any():
            return best_N
        has_filter = self._rows.facts.has_filter[rows]
        ids_N = best_N.clone()
        for which in np.flatnonzero(is_random & ~has_filter), np.flatnonzero(has_filter):
            if len(which) > 0:
                index, chosen = self._choose_some(logits_NV, which, rows, positions)
                ids_N[index] = chosen
        return ids_N

    def _choose_some(
        self, logits_NV: torch.Tensor, which: Indices, rows: Rows, positions: Int64
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows `which`, either all with filters or all without."""
        index, at_rows = self._index(which), self._index(rows[which])
        some_NV = logits_NV if len(which) == len(rows) else logits_NV[index]
        temperatures_N = self._rows.floats("temperature", at_rows)
        streams = self._rows.streams(at_rows, self._index(positions[which]))
        if not self._rows.facts.has_filter[rows[which[0]]]:
            return index, choose(some_NV, temperatures_N, streams)
        top_k = self._rows.facts.top_k[rows[which]]
        largest_k = int(top_k.max()) if (top_k > 0).all() else None
        filters = self._rows.filters(at_rows)
        return index, choose(some_NV, temperatures_N, streams, filters, largest_k)

    def _logprobs(
        self, raw_NV: torch.Tensor, ids_N: torch.Tensor, rows: Rows
    ) -> list[tuple[Rows, Int64, TokenLogprobs]]:
        """Rows with few candidates share one pass; those that want the vocabulary another one."""
        wanted = self._rows.facts.num_logprobs[rows]
        found = []
        for is_in_part in wanted >= 0, wanted == ALL_LOGPROBS:
            which = np.flatnonzero(is_in_part)
            if len(which) == 0:
                continue
            counts = np.where(wanted[which] == ALL_LOGPROBS, self.vocab_size, wanted[which])
            index = self._index(which)
            result = token_logprobs(raw_NV[index], ids_N[index], int(counts.max()))
            found.append((rows[which], counts, result))
        return found


def to_candidates(result: TokenLogprobs, counts: Int64) -> list[Candidates]:
    """Copies to the host. counts: how many candidates each row asked for, beside its own token."""
    ids = result.token_ids.to(torch.int32).cpu().numpy()
    logprobs = result.logprobs.cpu().numpy()
    ranks = result.ranks.tolist()
    return [
        Candidates(ids[r, : count + 1], logprobs[r, : count + 1], ranks[r])
        for r, count in enumerate(counts.tolist())
    ]


def describe_failures(rows: list[int], edited: Collection[int]) -> dict[int, str]:
    """What to say of rows that had no token to choose. edited: rows with masks or biases."""
    return {row: _NOTHING_LEFT if row in edited else _NOT_FINITE for row in rows}
